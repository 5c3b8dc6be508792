"""Reading pools: what they ask for, or why that cannot be."""

from agentfly_operator.plan.credentials import credentials_of
from agentfly_operator.plan.wanted import read_pool
from tests.unit.operator.make import pool


def test_a_pool_is_read_as_the_api_server_returns_it() -> None:
    read = read_pool(pool(capacity={"min": 1, "max": 4, "buffer": 2}, generation=3))
    assert (read.problem, read.generation) == ("", 3)
    assert (read.min, read.max, read.max_written, read.buffer, read.max_pending) == (1, 4, 4, 2, 1024)


def test_quota_lowers_max() -> None:
    read = read_pool(pool(capacity={"max": 8, "quota": {"cpu": 2}}, container={"image": "a", "cpu": 1}))
    assert (read.max, read.max_written) == (2, 8)


def test_what_cannot_be_read_is_told_by_field_with_a_remedy() -> None:
    read = read_pool(pool(capacity={"min": 9, "max": 8}))
    assert read.pool is None
    assert read.problem == "spec.capacity.max: 8 is less than min; raise max or lower min"


def test_what_a_cluster_cannot_give_is_told_too() -> None:
    read = read_pool(pool(container={"image": "host"}))
    assert "spec.container.image" in read.problem
    assert read.revision is None


def test_a_key_in_place_of_a_reference_is_not_repeated() -> None:
    api = {"baseUrl": "https://judge.example/v1", "credentials": [{"env": "sk-very-secret!"}]}
    read = read_pool(
        pool(type="ExternalAPI", scope="Global", externalAPI=api, container=None, capacity={"max": 1})
    )
    assert read.problem
    assert "sk-very-secret" not in read.problem


def test_credentials_are_the_secrets_of_external_apis_each_once() -> None:
    def judge(*names: str) -> dict[str, object]:
        credentials = [{"secretKeyRef": {"name": name, "key": "k"}} for name in names]
        return pool(type="ExternalAPI", externalAPI={"baseUrl": "https://x/v1", "credentials": credentials})

    assert credentials_of([judge("b", "a"), judge("a"), pool()]) == ("a", "b")
    broken = pool()
    broken["spec"] = {}
    assert credentials_of([broken]) == ()
