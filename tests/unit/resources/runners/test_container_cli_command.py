"""The command line of a container, without an engine."""

from pathlib import Path
from typing import Any

import pytest

from agentfly.resources.errors import StartFailed
from agentfly.resources.runners.bubblewrap.root import Scratch
from agentfly.resources.runners.container.command import (
    Engine,
    Placing,
    check,
    run,
    scratch,
    wanted_scratch,
)
from agentfly.resources.spec import ContainerSpec

PLACING = Placing(
    "agentfly-9-ab-1", "9-ab", "swe-1", Path("/opt/sandboxd"), Path("/run/r/1/o"), Path("/run/r/etc")
)
DOCKER = Engine(("/usr/bin/docker", "--context", "mine"))


def spec(**fields: Any) -> ContainerSpec:
    return ContainerSpec(runtime="container-cli", image="debian:12", **fields)


def rendered(engine: Engine = DOCKER, root: bool = True, **fields: Any) -> list[str]:
    wanted = spec(**fields)
    return run(engine, wanted, "sha256:1", root, PLACING, scratch(wanted, wanted_scratch(wanted)))


def values(argv: list[str], flag: str) -> list[str]:
    return [argv[place + 1] for place, word in enumerate(argv) if word == flag]


# 1. Limits and privileges.


def test_limits_are_the_specs() -> None:
    argv = rendered(cpu=1.5, memory_mb=512, pids=40)
    assert values(argv, "--cpus") == ["1.5"]
    assert values(argv, "--memory") == values(argv, "--memory-swap") == ["512m"]
    assert values(argv, "--pids-limit") == ["60"]  # the daemon's own threads are on top
    assert values(argv, "--shm-size") == ["32m"]


def test_engine_that_cannot_limit_is_not_asked_to() -> None:
    argv = rendered(Engine(("podman",), ("--ulimit", "nofile=10:10"), limits=False, disk=False), disk_mb=100)
    assert not {"--cpus", "--memory", "--pids-limit", "--storage-opt"} & set(argv)
    assert values(argv, "--ulimit") == ["nofile=10:10"]


def test_disk_is_bounded_where_the_spec_says_so() -> None:
    assert values(rendered(disk_mb=100), "--storage-opt") == ["size=100m"]
    assert "--storage-opt" not in rendered()


def test_only_root_has_capabilities_and_nobody_gains_any() -> None:
    argv = rendered()
    assert values(argv, "--cap-drop") == ["ALL"]
    assert set(values(argv, "--cap-add")) == {
        *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
    }
    assert values(argv, "--security-opt") == ["no-new-privileges"]
    assert values(rendered(root=False), "--cap-add") == []


def test_network_is_there_only_when_asked_for() -> None:
    assert values(rendered(), "--network") == ["none"]
    argv = rendered(network=True)
    assert "--network" not in argv
    assert not [mount for mount in values(argv, "--mount") if "resolv.conf" in mount]


# 2. The image and the daemon.


def test_daemon_replaces_the_entrypoint_of_the_image() -> None:
    argv = rendered()
    assert argv[:4] == ["/usr/bin/docker", "--context", "mine", "run"]
    assert values(argv, "--entrypoint") == ["/.agentfly/sandboxd"]
    assert argv[-3:] == ["sha256:1", "--handover", "/.agentfly/owner/h"]
    assert {"--rm", "--interactive"} <= set(argv)
    assert values(argv, "--pull") == ["never"]
    assert values(argv, "--label") == ["agentfly.owner=9-ab", "agentfly.member=swe-1"]


# 3. Mounts.


def test_everything_that_is_mounted_is_read_only_or_scratch() -> None:
    argv = rendered()
    assert values(argv, "--mount") == [
        "type=bind,source=/opt/sandboxd,target=/.agentfly/sandboxd,readonly",
        "type=bind,source=/run/r/1/o,target=/.agentfly/owner,readonly",
        "type=bind,source=/run/r/etc/hosts,target=/etc/hosts,readonly",
        "type=bind,source=/run/r/etc/hostname,target=/etc/hostname,readonly",
        "type=bind,source=/run/r/etc/resolv.conf,target=/etc/resolv.conf,readonly",
    ]
    assert "--volume" not in argv
    assert values(argv, "--tmpfs") == [
        "/tmp:rw,exec,nosuid,nodev,size=64m,mode=1777",
        "/run:rw,exec,nosuid,nodev,size=4m,mode=0755",
        "/workspace:rw,exec,nosuid,nodev,size=128m,mode=0777",
    ]


def test_podman_is_told_not_to_copy_into_scratch() -> None:
    assert all(value.endswith(",notmpcopyup") for value in values(rendered(Engine(("podman",))), "--tmpfs"))


def test_folder_that_the_image_fills_is_no_scratch() -> None:
    assert scratch(spec(), ["/run"]) == (Scratch("/run", "0755", 4),)


def test_workdir_that_is_scratch_anyway_is_mounted_once() -> None:
    assert wanted_scratch(spec(workdir="/tmp")) == ("/tmp", "/run")


# 4. Paths.


@pytest.mark.parametrize(
    "workdir", ["/", "/proc", "/proc/x", "/dev/shm", "/tmp/x", "/run/user/0", "/.agentfly"]
)
def test_workdir_that_cannot_be_mounted_is_refused(workdir: str) -> None:
    with pytest.raises(StartFailed, match=f"workdir: {workdir} lies inside") as caught:
        check(spec(workdir=workdir))
    assert caught.value.hints == ("use /workspace",)


@pytest.mark.parametrize("workdir", ["/workspace", "/tmp", "/run", "/testbed", "/home/u/x"])
def test_other_workdirs_are_taken(workdir: str) -> None:
    check(spec(workdir=workdir))
