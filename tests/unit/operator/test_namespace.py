"""What a namespace with pools needs, and what of it is missing."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.errors import AgentflyError
from agentfly_operator.cluster.secrets import fresh_secret
from agentfly_operator.names import CREDENTIALS
from agentfly_operator.plan.drift import covers
from agentfly_operator.plan.namespace import (
    OBJECTS,
    SECRETS,
    NamespacePlan,
    NamespaceSeen,
    Ref,
    living,
    owned_by,
    plan_namespace,
    ref_of,
)
from tests.unit.operator.make import CONFIG, pool

World = dict[Ref, dict[str, Any]]
ALWAYS = [ref for ref in OBJECTS if ref[1] != CREDENTIALS]


def going(name: str = "going") -> dict[str, Any]:
    dying = pool(name)
    dying["metadata"]["deletionTimestamp"] = "2026-11-30T12:00:00Z"
    return dying


def settle(
    pools: list[dict[str, Any]], world: World | None = None, credentials: tuple[str, ...] = ()
) -> World:
    """What is there after the plan was carried out as often as it takes."""
    world = copy.deepcopy(world or {})
    for _ in range(3):
        plan = plan_namespace("team", NamespaceSeen(pools, world, credentials), CONFIG)
        for name in plan.make:
            made = owned_by(fresh_secret("team", name), plan.owners)
            made["metadata"]["uid"] = f"uid-{name}-{len(world)}"
            world["Secret", name] = made
        for manifest in plan.apply:
            stored = world.get(ref_of(manifest), {})
            metadata = {**stored.get("metadata", {}), **manifest["metadata"]}
            world[ref_of(manifest)] = {**stored, **copy.deepcopy(manifest), "metadata": metadata}
        if plan == NamespacePlan(owners=plan.owners):
            return world
    raise AssertionError("does not settle")


# 1. with pools, and without ----------------------------------------------------------------------------


def test_a_namespace_with_a_pool_gets_all_of_it() -> None:
    assert set(settle([pool()])) == set(ALWAYS)


def test_a_namespace_without_living_pools_gets_nothing() -> None:
    assert plan_namespace("team", NamespaceSeen([]), CONFIG) == NamespacePlan()
    assert plan_namespace("team", NamespaceSeen([going()]), CONFIG) == NamespacePlan()
    left = settle([pool()])
    del left["Deployment", "agentfly-broker"]
    assert plan_namespace("team", NamespaceSeen([going()], left), CONFIG) == NamespacePlan()


# 2. owners ---------------------------------------------------------------------------------------------


def test_everything_is_owned_by_all_living_pools_and_by_no_other() -> None:
    world = settle([pool("b"), pool("a"), going()])
    for obj in world.values():
        owners = obj["metadata"]["ownerReferences"]
        assert [(each["name"], each["uid"]) for each in owners] == [("a", "uid-a"), ("b", "uid-b")]
        assert not any("blockOwnerDeletion" in each or "controller" in each for each in owners)


def test_owners_follow_the_pools() -> None:
    world = settle([pool("a")])
    plan = plan_namespace("team", NamespaceSeen([pool("a"), pool("b")], world), CONFIG)
    assert {ref_of(each) for each in plan.apply} == set(ALWAYS)
    assert plan.make == ()
    fewer = settle([pool("b")], settle([pool("a"), pool("b")], world))
    assert {len(obj["metadata"]["ownerReferences"]) for obj in fewer.values()} == {1}


def test_a_pool_that_came_again_under_its_name_is_another_owner() -> None:
    world, again = settle([pool("a")]), pool("a")
    again["metadata"]["uid"] = "uid-later"
    world = settle([again], world)
    uids = {obj["metadata"]["ownerReferences"][0]["uid"] for obj in world.values()}
    assert uids == {"uid-later"}


# 3. secrets --------------------------------------------------------------------------------------------


def test_secrets_are_made_once_and_keep_what_is_in_them() -> None:
    world = settle([pool("a")])
    before = {name: world["Secret", name]["data"] for name in SECRETS}
    after = settle([pool("a"), pool("b")], world)
    assert {name: after["Secret", name]["data"] for name in SECRETS} == before
    # Nodes do not bring a change of an immutable one to pods, and the token of clients may be replaced.
    assert {name: after["Secret", name].get("immutable", False) for name in SECRETS} == {
        "agentfly-broker": True,
        "agentfly-broker-client": False,
    }


def test_two_secrets_are_never_equal() -> None:
    for name, key in SECRETS.items():
        assert fresh_secret("team", name)["data"][key] != fresh_secret("team", name)["data"][key]


def test_a_signing_key_that_is_made_anew_restarts_the_broker() -> None:
    world = settle([pool()])
    old = world["Deployment", "agentfly-broker"]
    del world["Secret", "agentfly-broker"]
    new = settle([pool()], world)["Deployment", "agentfly-broker"]
    assert old["spec"]["template"] != new["spec"]["template"]


def test_without_its_secrets_no_broker_is_started() -> None:
    plan = plan_namespace("team", NamespaceSeen([pool()]), CONFIG)
    assert plan.make == tuple(SECRETS)
    assert ("Deployment", "agentfly-broker") not in {ref_of(each) for each in plan.apply}


def test_a_secret_without_its_key_is_told_with_a_remedy() -> None:
    world = settle([pool()])
    world["Secret", "agentfly-broker-client"]["data"] = {}
    with pytest.raises(AgentflyError) as caught:
        plan_namespace("team", NamespaceSeen([pool()], world), CONFIG)
    assert caught.value.message == "secret team/agentfly-broker-client: has no key client-token"
    assert caught.value.hints == (
        "kubectl -n team delete secret agentfly-broker-client, and it is made anew",
    )


# 4. what is there is not applied -----------------------------------------------------------------------


def test_what_others_added_is_no_reason_to_apply() -> None:
    world = settle([pool()])
    for obj in world.values():
        obj["metadata"] |= {"annotations": {"theirs": "x"}, "resourceVersion": "7"}
        obj["status"] = {"observedGeneration": 1}
    deployment = world["Deployment", "agentfly-broker"]["spec"]
    deployment["progressDeadlineSeconds"] = 600
    deployment["template"]["spec"]["containers"][0]["terminationMessagePath"] = "/dev/termination-log"
    assert plan_namespace("team", NamespaceSeen([pool()], world), CONFIG).apply == ()


@pytest.mark.parametrize("ref", [ref for ref in ALWAYS if ref[0] != "Secret"])
def test_what_is_missing_is_applied_and_nothing_else(ref: Ref) -> None:
    world = settle([pool()])
    del world[ref]
    plan = plan_namespace("team", NamespaceSeen([pool()], world), CONFIG)
    assert [ref_of(each) for each in plan.apply] == [ref]


def test_what_was_changed_is_put_right() -> None:
    world = settle([pool()])
    world["Deployment", "agentfly-broker"]["spec"]["replicas"] = 2
    plan = plan_namespace("team", NamespaceSeen([pool()], world), CONFIG)
    assert [each["spec"]["replicas"] for each in plan.apply] == [1]


# 5. order ----------------------------------------------------------------------------------------------


def test_members_are_walled_in_first_and_the_broker_comes_last() -> None:
    world = {ref: obj for ref, obj in settle([pool()]).items() if ref[0] == "Secret"}
    order = [ref_of(each) for each in plan_namespace("team", NamespaceSeen([pool()], world), CONFIG).apply]
    assert order[0] == ("NetworkPolicy", "agentfly-members")
    assert order[-1] == ("Deployment", "agentfly-broker")


# 6. rights ---------------------------------------------------------------------------------------------


def test_the_broker_reads_the_secrets_that_pools_name_and_no_others() -> None:
    read = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"], "resourceNames": ["judge"]}
    world = settle([pool()], credentials=("judge",))
    assert world["Role", CREDENTIALS]["rules"] == [read]
    assert world["RoleBinding", CREDENTIALS]["roleRef"]["name"] == CREDENTIALS
    assert settle([pool()], world)["Role", CREDENTIALS]["rules"] == []
    assert not any("secrets" in rule["resources"] for rule in world["Role", "agentfly-broker"]["rules"])


def test_rights_to_secrets_come_last() -> None:
    world = settle([pool()], credentials=("judge",))
    secrets = {ref: obj for ref, obj in world.items() if ref[0] == "Secret"}
    seen = NamespaceSeen([pool()], secrets, ("judge",))
    order = [ref_of(each) for each in plan_namespace("team", seen, CONFIG).apply]
    assert order[-3:] == [
        ("Deployment", "agentfly-broker"),
        ("Role", CREDENTIALS),
        ("RoleBinding", CREDENTIALS),
    ]


# Properties --------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), unique_by=lambda each: each[0]))
def test_a_plan_that_was_carried_out_is_empty(pools: list[tuple[str, bool]]) -> None:
    objects = [going(name) if dying else pool(name) for name, dying in pools]
    world = settle(objects)
    assert set(world) == (set(ALWAYS) if living(objects) else set())
    again = plan_namespace("team", NamespaceSeen(list(reversed(objects)), world), CONFIG)
    assert (again.make, again.apply) == ((), ())


# Drift -------------------------------------------------------------------------------------------------

COVERED = {
    "equal": ({"a": 1}, {"a": 1}, True),
    "more is there": ({"a": 1, "b": 2}, {"a": 1}, True),
    "another value": ({"a": 2}, {"a": 1}, False),
    "absent": ({}, {"a": 1}, False),
    "nothing at all": (None, {"a": 1}, False),
    "true is not one": ({"a": True}, {"a": 1}, False),
    "named items in another order": (
        [{"name": "b"}, {"name": "a", "x": 1}],
        [{"name": "a"}, {"name": "b"}],
        True,
    ),
    "a named item too many": ([{"name": "a"}, {"name": "b"}], [{"name": "a"}], False),
    "another name": ([{"name": "b"}], [{"name": "a"}], False),
    "plain items in another order": ([2, 1], [1, 2], False),
    "owners by uid": ([{"uid": "2", "name": "a"}], [{"uid": "1", "name": "a"}], False),
    "an empty list": ([], [], True),
    "an item where none is wanted": ([1], [], False),
    "text is no list": ("ab", ["a", "b"], False),
}


@pytest.mark.parametrize(("live", "wanted", "want"), COVERED.values(), ids=COVERED.keys())
def test_covers(live: Any, wanted: Any, want: bool) -> None:
    assert covers(live, wanted) is want
