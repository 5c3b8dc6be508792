"""Agentic reinforcement learning that runs on Kubernetes, and on one machine without it."""
