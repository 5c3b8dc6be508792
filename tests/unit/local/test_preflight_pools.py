"""What pools name: keys that are there, factories that can be called, absolute paths."""

import pytest

from tests.unit.local.test_preflight import Folder, folder

__all__ = ["folder"]

API = {
    "type": "ExternalAPI",
    "scope": "Global",
    "externalAPI": {"baseUrl": "https://judge/v1"},
    "capacity": {"max": 1},
}


def api(*credentials: dict) -> dict:
    return {**API, "externalAPI": {**API["externalAPI"], "credentials": list(credentials)}}


def game(entrypoint: str, **kwargs: object) -> dict:
    made = {"entrypoint": entrypoint, "kwargs": kwargs}
    return {"type": "InProcess", "inProcess": made, "capacity": {"max": 2}}


def test_a_key_in_a_file_is_relative_to_the_manifest_and_never_read(folder: Folder, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "value-of-one")
    (folder.base / "key.txt").write_text("value-of-two")
    folder.pool("judge", api({"env": "JUDGE_KEY"}, {"file": "key.txt"}))
    (pool,) = folder.run().pools
    assert pool.spec.external_api is not None
    first, second = pool.spec.external_api.credentials
    assert (first.env, first.file) == ("JUDGE_KEY", None)
    assert (second.env, second.file) == (None, str(folder.base / "key.txt"))
    assert "value-of" not in repr(pool)


@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_that_is_not_set_is_refused(folder: Folder, monkeypatch, value):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    folder.pool("judge", api({"env": "JUDGE_KEY"}))
    assert folder.refused() == (
        "ResourcePool judge: spec.externalAPI.credentials[0].env: JUDGE_KEY is not set in this environment\n"
        "  hint: export JUDGE_KEY=... before the run"
    )


def test_a_file_that_is_not_there_is_refused(folder: Folder):
    folder.pool("judge", api({"file": "key.txt"}))
    assert folder.refused() == (
        "ResourcePool judge: spec.externalAPI.credentials[0].file: <here>/key.txt cannot be read\n"
        "  hint: write the key into it, readable to you alone"
    )


def test_a_factory_in_a_file_is_relative_to_the_manifest(folder: Folder, monkeypatch):
    monkeypatch.chdir("/")
    folder.pool("chess", game("agent.py:endless", seed=1))
    folder.pool("dates", game("datetime:date"))
    chess, dates = folder.run().pools
    assert chess.spec.in_process is not None
    assert dates.spec.in_process is not None
    assert chess.spec.in_process.entrypoint == f"{folder.base}/agent.py:endless"
    assert dates.spec.in_process.entrypoint == "datetime:date"


@pytest.mark.parametrize(
    ("entrypoint", "error"),
    [
        (
            "agent.py:AGENT",
            "agent.py:AGENT: agent.py has no AGENT\n  hint: define AGENT at the top level of agent.py",
        ),
        (
            "datetime:MAXYEAR",
            "datetime:MAXYEAR: is of type int, not a function or a class\n  hint: name what makes one",
        ),
    ],
)
def test_a_factory_that_cannot_be_called_is_refused(folder: Folder, entrypoint, error):
    folder.pool("chess", game(entrypoint))
    assert folder.refused().startswith(f"ResourcePool chess: spec.inProcess.entrypoint: {error}")


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"sead": 1}, "missing a required argument: 'seed'"),
        ({"seed": 1, "size": 2}, "got an unexpected keyword argument 'size'"),
    ],
)
def test_kwargs_that_a_factory_does_not_take_are_refused_with_those_it_does(folder: Folder, kwargs, error):
    folder.pool("chess", game("agent.py:endless", **kwargs))
    refused = folder.refused().splitlines()
    assert refused[0] == f"ResourcePool chess: spec.inProcess.kwargs: agent.py:endless: {error}"
    assert refused[1].startswith("  hint: it is defined as endless(seed")


def test_what_only_a_cluster_has_is_refused(folder: Folder):
    folder.pool("judge", api({"secretKeyRef": {"name": "judge", "key": "token"}}))
    assert folder.refused() == (
        "ResourcePool judge: spec.externalAPI.credentials[0].secretKeyRef: Secret judge is in a cluster, "
        "and this is one machine\n"
        "  hint: write env or file"
    )
