"""What agentfly costs on a real Kubernetes of this machine: `python -m tests.bench cluster`."""
