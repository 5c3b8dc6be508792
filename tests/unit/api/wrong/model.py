"""Stands beside the manifests so that their references lead somewhere; it is never run."""
