"""What marks a pod as a member: labels, annotations, and what can be read back from them.

Guarantees:
1. ``recall`` gives back what ``labels`` and ``annotations`` were made of.
2. What was changed by others so that it is no member's any more is a ``ResourceError`` that names the field.
"""

import functools
import json
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from agentfly.kube import Obj
from agentfly.resources.errors import ResourceError
from agentfly.resources.names import pool_of
from agentfly.resources.spec import OneSpec, ResourceSpec, parse_spec

POOL = "agentfly.dev/pool"
COMPONENT = "agentfly.dev/component"
MANAGED_BY = "app.kubernetes.io/managed-by"
SPEC = "agentfly.dev/spec"
SPEC_JSON = "agentfly.dev/spec-json"
START = "agentfly.dev/start"
"""Drawn for each start: a pod that is there already is ours if it has the same."""

MEMBER_LABELS = f"{MANAGED_BY}=agentfly,{COMPONENT}=member"
"""Selects the members of all pools."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """What a pod says of the member that it is."""

    pool: str
    member_id: str
    spec: OneSpec


def labels(pool: str, spec: ResourceSpec) -> dict[str, str]:
    """The labels of a member's pod."""
    return {
        POOL: pool,
        COMPONENT: "member",
        MANAGED_BY: "agentfly",
        SPEC: spec.identity(),
    }


def annotations(spec: ResourceSpec, start: str) -> dict[str, str]:
    """What the pod records of its member, for whoever comes later."""
    shown = {"kind": spec.kind} | spec.model_dump(mode="json", exclude_defaults=True)
    return {
        SPEC_JSON: json.dumps(shown, separators=(",", ":")),
        START: start,
    }


def recall(pod: Obj) -> Recalled:
    """The member that a pod is.

    Raises:
        ResourceError: it is none of ours, or nobody can say which.
    """
    meta = pod["metadata"]
    name, recorded = str(meta["name"]), meta.get("annotations") or {}
    pool = str((meta.get("labels") or {}).get(POOL, ""))
    if pool_of(name) != pool:
        raise ResourceError(f"pod {name}: label {POOL}: {pool!r} is not the pool of its name")
    try:
        spec = _spec(recorded[SPEC_JSON])
    except KeyError as error:
        raise ResourceError(f"pod {name}: annotation {error.args[0]}: is missing") from error
    except (ValidationError, ValueError) as error:
        raise ResourceError(f"pod {name}: annotation {SPEC_JSON}: is no spec: {error}") from error
    return Recalled(pool, name, spec)


@functools.lru_cache(maxsize=256)
def _spec(text: str) -> OneSpec:
    """The thousands of pods of a pool have one spec, in memory too."""
    return parse_spec(_object(text))


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found
