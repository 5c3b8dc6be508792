"""Manifests of what the operator applies. Pure: no clock, no randomness, no API."""
