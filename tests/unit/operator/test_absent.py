"""Which objects that specs name are not there."""

import asyncio
from typing import Any, cast

import pytest

from agentfly.kube import PERSISTENT_VOLUME_CLAIMS, Kube, KubeError, NotFound
from agentfly_operator.cluster import absent as module
from agentfly_operator.cluster.absent import Absent
from agentfly_operator.cluster.children import Children
from agentfly_operator.cluster.works import named
from tests.unit.operator.fake_kube import FakeKube
from tests.unit.operator.make_children import meta, told
from tests.unit.operator.make_work import job, run

CLAIM = ("PersistentVolumeClaim", "runs")


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube()


@pytest.fixture
def children(kube: FakeKube) -> Children:
    return Children(cast(Kube, kube), (), lambda _: None)


async def test_what_is_missing_is_looked_for_soon_and_what_is_there_seldom(
    kube: FakeKube, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MISSING_S", 0.02)
    absent = Absent(cast(Kube, kube), children)
    pool = ("ResourcePool", "shell")
    assert await absent.of("team", [CLAIM, pool]) == ("PersistentVolumeClaim runs", "ResourcePool shell")
    await absent.of("team", [CLAIM, pool])
    assert kube.calls == [("get", "persistentvolumeclaims", "runs")]
    kube.put(PERSISTENT_VOLUME_CLAIMS, {"metadata": {"name": "runs", "namespace": "team"}})
    told("ResourcePool", "ADDED", {"metadata": meta("shell", "q", "")}, children)
    await asyncio.sleep(0.03)
    assert await absent.of("team", [CLAIM, pool]) == ()
    await asyncio.sleep(0.03)
    kube.objects.clear()
    assert await absent.of("team", [CLAIM, pool]) == ()
    assert len(kube.calls) == 2


@pytest.mark.parametrize("error", [KubeError("no", status=403), KubeError("down", status=0)])
async def test_what_cannot_be_looked_up_counts_as_there(
    kube: FakeKube, children: Children, error: KubeError
) -> None:
    kube.refuses["get", "persistentvolumeclaims"] = error
    assert await Absent(cast(Kube, kube), children).of("team", [CLAIM]) == ()


async def test_what_was_missing_stays_so_while_nobody_answers(
    kube: FakeKube, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MISSING_S", 0.0)
    absent = Absent(cast(Kube, kube), children)
    kube.refuses["get", "persistentvolumeclaims"] = NotFound("none", status=404)
    assert await absent.of("team", [CLAIM]) == ("PersistentVolumeClaim runs",)
    kube.refuses["get", "persistentvolumeclaims"] = KubeError("down", status=0)
    assert await absent.of("team", [CLAIM]) == ("PersistentVolumeClaim runs",)


def test_every_secret_of_its_pods_is_named_once() -> None:
    def pods(*names: str) -> dict[str, Any]:
        key = [{"secretKeyRef": {"name": name, "key": "k"}} for name in names]
        return {"pod": {"env": [{"name": f"V{n}", "valueFrom": each} for n, each in enumerate(key)]}}

    training = run(trainer=pods("b", "a"), inference=pods("a", "c"))
    works = (training, job(workers=pods("b", "a"), inference=pods("c")))
    for work in works:
        assert [name for kind, name in named(work) if kind == "Secret"] == ["b", "a", "c"]
