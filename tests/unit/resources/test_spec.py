"""Section numbers are the guarantees of spec.py and errors.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentfly.errors import AgentflyError
from agentfly.resources import errors
from agentfly.resources.spec import (
    ContainerSpec,
    ExternalAPISpec,
    InProcessSpec,
    ModelServiceSpec,
    PoolSpec,
    parse_spec,
)

OTHER_VALUES = {
    "image": "/srv/root",
    "cpu": 2.0,
    "memory_mb": 512,
    "cpu_request": 0.1,
    "memory_request_mb": 32,
    "disk_mb": 64,
    "runtime": "enroot",
    "reset": {"method": "recreate"},
    "pids": 65,
    "env": {"A": "1"},
    "network": True,
    "workdir": "/w",
    "pod": {"security": "restricted"},
}


# 1, 2. Identity.


@pytest.mark.parametrize("field", sorted(set(ContainerSpec.model_fields) - {"kind"}))
def test_every_field_is_part_of_the_identity(field):
    assert ContainerSpec(**{field: OTHER_VALUES[field]}).identity() != ContainerSpec().identity()


def test_kinds_with_equal_fields_differ():
    model = ModelServiceSpec(model="host", max_model_len=1)
    assert model.identity() != ContainerSpec().identity()
    assert len(model.identity()) == 16


@given(st.dictionaries(st.text(min_size=1), st.text(), max_size=5))
def test_identity_ignores_order_and_written_defaults(env):
    spec = ContainerSpec(env=env)
    again = ContainerSpec(env=dict(reversed(env.items())), cpu=1.0, image="host")
    assert spec.identity() == again.identity()
    assert parse_spec(spec.model_dump(mode="json")) == spec


@given(*[st.dictionaries(st.text(min_size=1), st.text(), max_size=3)] * 2)
def test_unlike_environments_have_unlike_identities(one, other):
    same = ContainerSpec(env=one).identity() == ContainerSpec(env=other).identity()
    assert same is (one == other)


def test_identity_is_the_same_in_every_process():
    assert ContainerSpec().identity() == "3f7e2c3ec31905c3"


# 3. What is refused.

REFUSED = {
    "image": "",
    "cpu": 0,
    "memory_mb": 0,
    "pids": -1,
    "workdir": "relative",
    "gpu": 1,
}


@pytest.mark.parametrize(("field", "value"), REFUSED.items())
def test_bad_container_field_is_refused_by_name(field, value):
    with pytest.raises(ValidationError) as refused:
        ContainerSpec(**{field: value})
    assert [error["loc"] for error in refused.value.errors()] == [(field,)]


@pytest.mark.parametrize("data", [{"kind": "container", "model": "m"}, {"kind": "vm"}, {}])
def test_unknown_kind_or_field_is_refused(data):
    with pytest.raises(ValidationError):
        parse_spec(data)


def test_min_above_max_is_refused():
    with pytest.raises(ValidationError, match="min: 3 is above max: 2"):
        PoolSpec(name="p", resource=ContainerSpec(), min=3, max=2)


@pytest.mark.parametrize(
    "fields",
    [
        {"max": 0},
        {"min": -1},
        {"lease_ttl_s": 0},
        {"max_pending": -1},
        {"max_reuses": -1},
        {"max_lifetime_s": 0},
        {"per_node": 0},
        {"acquire_timeout_s": 0},
        {"max_resident_images": 0},
    ],
)
def test_pool_numbers_out_of_range_are_refused(fields):
    with pytest.raises(ValidationError) as refused:
        PoolSpec(name="p", resource=ContainerSpec(), **fields)
    assert refused.value.errors()[0]["loc"] == tuple(fields)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"reserved": {"verify": 2}}, "reserved: 2 members leave none of max: 2"),
        ({"quarantine": 2}, "quarantine: 2 members could fill all of max: 2"),
        ({"shared": True, "reserved": {"verify": 1}}, "reserved: every holder of a shared pool has a member"),
        ({"shared": True, "per_image": True}, "per_image: the members of a shared pool are alike"),
        (
            {"per_image": True, "resource": InProcessSpec(entrypoint="a:b")},
            "per_image: a in-process has no image",
        ),
        ({"max_resident_images": 1}, "max_resident_images: all members of the pool have one image"),
    ],
)
def test_what_a_pool_cannot_be_is_refused(fields, why):
    with pytest.raises(ValidationError, match=why):
        PoolSpec(**{"name": "p", "resource": ContainerSpec(), "max": 2, **fields})


def test_a_model_service_in_a_pod_needs_an_image():
    service = {"kind": "model-service", "model": "m", "max_model_len": 1, "runtime": "kubernetes"}
    with pytest.raises(ValidationError, match="image: is missing"):
        parse_spec(service)
    assert parse_spec(service | {"image": "vllm"}).runner == "model-service-pod"
    assert parse_spec(service | {"runtime": "process"}).runner == "model-service"


@pytest.mark.parametrize(
    "reference", ["secret:keys", "secret:keys/", "secret:/key", "secret:a/b/c", "env:", "key"]
)
def test_a_credential_that_refers_to_nothing_is_refused(reference):
    with pytest.raises(ValidationError) as refused:
        ExternalAPISpec(base_url="https://a", credentials=(reference,))
    assert [error["loc"] for error in refused.value.errors()] == [("credentials", 0)]


def test_a_credential_may_be_a_key_of_a_secret():
    assert ExternalAPISpec(base_url="https://a", credentials=("secret:keys/judge",)).credentials


def test_specs_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        ContainerSpec().cpu = 2.0


# Errors.

ALL = [
    errors.Timeout("t"),
    errors.Saturated("s", retry_after=2.0),
    errors.LeaseLost("l", incarnation=3),
    errors.StartFailed("member m: broken", reason="broken"),
    errors.Infra("i"),
    errors.SpecMismatch("x"),
    errors.PoolNotFound("p"),
]


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_every_error_is_a_resource_error(error):
    assert isinstance(error, errors.ResourceError)
    assert isinstance(error, AgentflyError)


def test_what_code_acts_on_is_a_field():
    assert errors.Saturated("s", retry_after=2.0).retry_after == 2.0
    assert errors.LeaseLost("l", incarnation=3).incarnation == 3
    assert errors.LeaseLost("l").incarnation == 0
    assert errors.StartFailed("member m: broken", reason="broken").reason == "broken"
    assert errors.StartFailed("broken").reason == "broken"
