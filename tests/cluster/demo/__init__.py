"""From nothing to `kubectl get rpool` on this machine: `python -m tests.cluster.demo`."""
