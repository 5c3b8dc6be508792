"""A namespace of a cluster that is up, and what a user of his own cluster types there.

Guarantees:
1. Every command is told before it is run, with what it printed.
2. Everything that is waited for has a deadline; meanwhile what is watched is shown whenever it has changed.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.cluster import Cluster
from tests.cluster.machine import ClusterError

ROOT = Path(__file__).parents[3]
BASE = ROOT / "manifests/base"
EXAMPLES = ROOT / "examples/cluster"
AGENT = ROOT / "examples/quickstart"
SYSTEM = "agentfly-system"
OPERATOR_S = 180.0
ASK_S = 1.0
LOOK_S = 5.0

Say = Callable[[str], None]
Document = dict[str, Any]


class Scene:
    """A namespace, which `install` makes. ``say`` is told every line for people.

    Args:
        watched: what is shown, as kubectl names it.
    """

    def __init__(self, cluster: Cluster, namespace: str, watched: str, say: Say) -> None:
        self._cluster, self._namespace, self._watched, self._say = cluster, namespace, watched, say
        self._shown: list[list[str]] = []

    def _install(self) -> None:
        """The operator, and the namespace; the operator need not be up yet."""
        self._type("apply", "-k", short(BASE))
        self._type("create", "namespace", self._namespace)

    def _operator(self) -> None:
        """Until the operator is up."""
        self._type(
            *("rollout", "status", "deployment/agentfly-operator", "-n", SYSTEM),
            f"--timeout={OPERATOR_S:.0f}s",
            within_s=OPERATOR_S,
        )

    def _until(self, what: str, done: Callable[[], bool], within_s: float) -> None:
        """Asks once a second, and shows what is watched when it has changed.

        Raises:
            ClusterError: it is not so in time.
        """
        begun = shown = time.monotonic()
        while not done():
            now = time.monotonic()
            if now - begun > within_s:
                pods = self._cluster.kubectl("get", "pods", *self._here)
                raise ClusterError(f"{what}: not so within {within_s:.0f} s\n{pods}{self._table()}")
            if now - shown > LOOK_S:
                shown = now
                self._show()
            time.sleep(ASK_S)

    def _show(self) -> None:
        table = self._table().rstrip()
        what = [line.split()[:-1] for line in table.splitlines()]  # without the age
        if what != self._shown:
            self._say(f"$ kubectl get {self._watched}{self._where}\n{table}")
        self._shown = what

    def _table(self) -> str:
        return self._cluster.kubectl("get", self._watched, *self._here)

    def _get(self, kind: str, *more: str) -> list[Document]:
        found = json.loads(self._cluster.kubectl("get", kind, *more, "-o", "json", *self._here))
        items: list[Document] = found["items"]
        return items

    def _put(self, what: str, documents: Sequence[Document]) -> None:
        """Applies documents, and tells that ``what`` was applied."""
        self._say(f"$ kubectl apply {what}{self._where}")
        text = yaml.safe_dump_all(documents)
        self._say(self._cluster.kubectl("apply", "-f", "-", *self._here, stdin=text).rstrip())

    def _type(self, *words: str, within_s: float = 60.0) -> None:
        self._say(f"$ kubectl {' '.join(words)}")
        self._say(self._cluster.kubectl(*words, timeout_s=within_s + 10).rstrip())

    @property
    def _here(self) -> tuple[str, str]:
        return ("-n", self._namespace)

    @property
    def _where(self) -> str:
        return f" -n {self._namespace}"


def short(path: Path) -> str:
    """A path of this repository as people type it."""
    return str(path.relative_to(ROOT))
