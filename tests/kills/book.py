"""What was ever seen of the children of runs and jobs, and which of it must never be.

Guarantees:
1. Every object that was there is judged, however short it lived: it is told of by a watch, not asked for.
2. A wrong is told once, in a sentence that names the objects.
3. What must never be, of one run or job: trainer pods of two attempts at a time; a second pod of the same
   attempt and index, ever; two pools of its policy, or more servers than it has; a second preparation, ever,
   or two pods of it at a time; two pods at a time that play the same shard; more sandboxes than a pool has.
4. Of a status: the attempt goes up one by one, restarts, failures and the step of the checkpoint never go
   down, an end stays the end.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Object = Mapping[str, Any]

_PREFIX = "agentfly.dev"
_OWNERS = {f"{_PREFIX}/training-run": "run", f"{_PREFIX}/rollout-job": "job"}
_OVER = ("Succeeded", "Failed")
_SHARD = "batch.kubernetes.io/job-completion-index"


class Book:
    """Takes the events of watches, in the order of each watch.

    Args:
        most: how many members of a pool may be there, by its name; the pool of a policy has one.
    """

    def __init__(self, most: Mapping[str, int]) -> None:
        self._most = most
        self._there: dict[str, dict[str, Object]] = defaultdict(dict)
        self._ever: dict[tuple[str, ...], dict[str, None]] = defaultdict(dict)
        self._status: dict[str, Object] = {}
        self.wrongs: list[str] = []

    def see(self, kind: str, event: str, obj: Object) -> None:
        """An object of a kind was ADDED, MODIFIED or DELETED."""
        uid = obj["metadata"]["uid"]
        if event == "DELETED":
            self._there[kind].pop(uid, None)
        else:
            self._there[kind][uid] = obj
            self._remember(kind, uid, obj)
        if kind in ("TrainingRun", "RolloutJob"):
            wrongs: Iterable[str] = self._of_status(kind, uid, obj) if event != "DELETED" else ()
        else:
            wrongs = self._of_children(kind)
        for wrong in wrongs:
            if wrong not in self.wrongs:
                self.wrongs.append(wrong)

    def of(self, kind: str) -> list[Object]:
        """What is there now."""
        return list(self._there[kind].values())

    def _remember(self, kind: str, uid: str, obj: Object) -> None:
        labels = _labels(obj)
        if kind == "Pod" and labels.get(f"{_PREFIX}/role") == "trainer":
            index = labels[f"{_PREFIX}/index"]
            self._ever["trainer pod", _owner(obj), labels[f"{_PREFIX}/attempt"], index][uid] = None
        if kind == "Job" and labels.get(f"{_PREFIX}/role") == "prepare":
            self._ever["preparation", _owner(obj)][uid] = None

    def _of_children(self, kind: str) -> Iterator[str]:
        for what, uids in self._ever.items():
            if len(uids) > 1:
                yield f"{' '.join(what)}: made {len(uids)} times"
        if kind == "ResourcePool":
            yield from _more_than_one("pools of the policy", self._role(kind, "policy"), _owner)
        if kind == "Pod":
            yield from self._attempts()
            alive = [pod for pod in self.of("Pod") if _phase(pod) not in _OVER]
            role = f"{_PREFIX}/role"
            players = [pod for pod in alive if _labels(pod).get(role) == "worker"]
            yield from _more_than_one("pods of shard", players, lambda pod: f"{_owner(pod)} {_shard(pod)}")
            preparing = [pod for pod in alive if _labels(pod).get(role) == "prepare"]
            yield from _more_than_one("pods of the preparation", preparing, _owner)
            yield from self._members(alive)

    def _attempts(self) -> Iterator[str]:
        found: dict[str, dict[str, str]] = defaultdict(dict)
        for pod in self._role("Pod", "trainer"):
            found[_owner(pod)][_labels(pod)[f"{_PREFIX}/attempt"]] = _name(pod)
        for owner, pods in found.items():
            if len(pods) > 1:
                yield f"{owner}: pods of two attempts at a time: {', '.join(sorted(pods.values()))}"

    def _members(self, alive: Iterable[Object]) -> Iterator[str]:
        stay = [pod for pod in alive if "deletionTimestamp" not in pod["metadata"]]
        pools = Counter(_labels(pod)[f"{_PREFIX}/pool"] for pod in stay if f"{_PREFIX}/pool" in _labels(pod))
        for pool, number in pools.items():
            if number > self._most.get(pool, 1):
                yield f"pool {pool}: {number} members at a time, not {self._most.get(pool, 1)}"

    def _role(self, kind: str, role: str) -> list[Object]:
        return [obj for obj in self.of(kind) if _labels(obj).get(f"{_PREFIX}/role") == role]

    def _of_status(self, kind: str, uid: str, obj: Object) -> Iterator[str]:
        before, status = self._status.get(uid, {}), obj.get("status") or {}
        self._status[uid] = status
        name = f"{kind} {_name(obj)}"
        old, new = before.get("attempt", 0), status.get("attempt", 0)
        if new not in (old, old + 1):
            yield f"{name}: attempt {new} after {old}"
        for field in ("restarts", "failures"):
            if kind == "TrainingRun" and status.get(field, 0) < before.get(field, 0):
                yield f"{name}: {field} {status.get(field, 0)} after {before[field]}"
        for block, field in (("checkpoint", "latestStep"), ("shards", "done"), ("tasks", "scored")):
            last, now = ((each.get(block) or {}).get(field, 0) for each in (before, status))
            if now < last:
                yield f"{name}: {block}.{field} {now} after {last}"
        if before.get("phase") in _OVER and status.get("phase") != before["phase"]:
            yield f"{name}: {status.get('phase')} after {before['phase']}"


def _more_than_one(what: str, objects: Iterable[Object], key: Any) -> Iterator[str]:
    found: dict[str, list[str]] = defaultdict(list)
    for obj in objects:
        found[key(obj)].append(_name(obj))
    for owner, names in found.items():
        if len(names) > 1:
            yield f"{what} {owner}: {len(names)} at a time: {', '.join(sorted(names))}"


def _labels(obj: Object) -> Mapping[str, str]:
    return obj["metadata"].get("labels") or {}


def _name(obj: Object) -> str:
    return str(obj["metadata"]["name"])


def _phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", ""))


def _owner(obj: Object) -> str:
    labels = _labels(obj)
    return next((f"{what} {labels[label]}" for label, what in _OWNERS.items() if label in labels), "nobody")


def _shard(pod: Object) -> str:
    return str((pod["metadata"].get("annotations") or {}).get(_SHARD) or _labels(pod).get(_SHARD, ""))
