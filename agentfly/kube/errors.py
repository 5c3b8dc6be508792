"""What can go wrong between us and the API server, one type for each thing a caller does differently.

Guarantees:
1. Every error of this layer is a ``KubeError``; ``status`` is the HTTP status, 0 where there was no answer.
2. The message has what the server said of it, its status and reason, and which request it was an answer to.

Not here: what to do about a conflict or a missing object. That depends on who asked.
"""

import json
from collections.abc import Sequence

from agentfly.errors import AgentflyError

_TEXT = 500  # characters of an answer that is not a Status


class KubeError(AgentflyError):
    """The API server refused a request, or could not be reached.

    Attributes:
        status: of the answer; 0 without one.
        reason: the server's word for it, for example ``AlreadyExists``; "" if it gave none.
    """

    def __init__(self, message: str, *, status: int = 0, reason: str = "", hints: Sequence[str] = ()) -> None:
        super().__init__(message, hints=hints)
        self.status = status
        self.reason = reason


class NotFound(KubeError):
    """There is no such object, or no such kind of object."""


class Conflict(KubeError):
    """The object exists already, was changed by somebody else, or is another than the one that was meant."""


class Gone(KubeError):
    """What was asked for is too old: the list has to be read anew."""


class Unreachable(KubeError):
    """No answer before the deadline; whether a write was carried out is not known."""


_TYPES: dict[int, type[KubeError]] = {404: NotFound, 409: Conflict, 410: Gone}
_HINTS = {
    401: "the credentials are not known to this cluster: log in again, or name another kubeconfig",
    403: "grant it with a Role, then check with: kubectl auth can-i VERB RESOURCE --as=USER",
}


def refused(request: str, status: int, content: bytes) -> KubeError:
    """What an answer with an error status means.

    Args:
        request: its method and path.
        content: the body, usually a ``Status`` object.
    """
    try:
        body = json.loads(content)
        message, reason = str(body["message"]), str(body.get("reason") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, reason = content[:_TEXT].decode(errors="replace").strip() or "no explanation", ""
    what = f"{status} {reason}".rstrip()
    hints = [_HINTS[status]] if status in _HINTS else []
    return _TYPES.get(status, KubeError)(
        f"kubernetes: {message} ({what} to {request})", status=status, reason=reason, hints=hints
    )
