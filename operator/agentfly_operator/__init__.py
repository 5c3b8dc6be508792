"""The operator: it makes a namespace with ResourcePools able to serve them, and shows how they do.

`plan` decides (pure), `render` makes manifests (pure), `cluster` acts, `handlers` is what kopf is used for.
Member pods are the broker's: the operator never creates one.
"""

__version__ = "0.1"
USER_AGENT = f"agentfly-operator/{__version__}"
