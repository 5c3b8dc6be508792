"""A real Kubernetes for the tests, on this machine alone: `python -m tests.cluster up|down|status|env|x`.

Nothing of the product imports this package. README.md beside this file says how to use it.
"""
