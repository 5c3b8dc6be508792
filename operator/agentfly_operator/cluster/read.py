"""Runs and jobs as models, though the API server's definition of them may be another release's.

Guarantees:
1. Fields of a status that this release does not know are left out, and the rest of it is read.
2. A status that cannot be read even so is an error: it is all that is remembered of a run, and nothing may be
   written in its place.
3. A spec that cannot be read is no error here: it is returned as a sentence, with the status.
"""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from agentfly.api.common import ApiObject, WorkStatus
from agentfly.errors import AgentflyError

W = TypeVar("W", bound=ApiObject)
S = TypeVar("S", bound=WorkStatus)
_ROUNDS = 8  # unknown fields may hide behind each other, where one ends a validation

Object = dict[str, Any]


def read(model: type[W], obj: Object, status: WorkStatus) -> W | str:
    """The object with the status that `read_status` found, or why its spec cannot be read."""
    try:
        return model.model_validate({**obj, "status": status})
    except ValidationError as error:
        return _first(error)


def read_status(model: type[S], obj: Object) -> S:
    """The status of an object.

    Raises:
        AgentflyError: it cannot be read.
    """
    status = copy.deepcopy(obj.get("status") or {})
    for _ in range(_ROUNDS):
        try:
            return model.model_validate(status)
        except ValidationError as error:
            unknown = [each["loc"] for each in error.errors() if each["type"] == "extra_forbidden"]
            if not unknown:
                raise _unread(obj, error) from error
            for place in unknown:
                _drop(status, place)
    raise AgentflyError(f"{_name(obj)}: its status has too many unknown fields")


def _drop(status: Any, place: tuple[int | str, ...]) -> None:
    *above, last = place
    for part in above:
        status = status[part]
    del status[last]


def _unread(obj: Object, error: ValidationError) -> AgentflyError:
    return AgentflyError(
        f"{_name(obj)}: status.{_first(error)}",
        hints=["update the operator: its status may be a newer one's, and stays as it is until it is read"],
    )


def _name(obj: Mapping[str, Any]) -> str:
    return f"{obj.get('kind', 'object')} {obj['metadata']['namespace']}/{obj['metadata']['name']}"


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
