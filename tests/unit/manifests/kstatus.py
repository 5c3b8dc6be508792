"""kstatus' decision for objects of kinds that it does not know, as Flux and others make it.

The order is that of cli-utils, pkg/kstatus/status/{status,generic}.go.
"""

from collections.abc import Mapping
from typing import Any


def kstatus(obj: Mapping[str, Any]) -> str:
    """Current, InProgress, Failed or Terminating."""
    if "deletionTimestamp" in obj["metadata"]:
        return "Terminating"
    status = obj.get("status", {})
    if "observedGeneration" in status and status["observedGeneration"] != obj["metadata"]["generation"]:
        return "InProgress"
    for condition in status.get("conditions", []):
        if condition["type"] == "Reconciling" and condition["status"] == "True":
            return "InProgress"
        if condition["type"] == "Stalled" and condition["status"] == "True":
            return "Failed"
    for condition in status.get("conditions", []):
        if condition["type"] == "Ready":
            return "Current" if condition["status"] == "True" else "InProgress"
    return "Current"
