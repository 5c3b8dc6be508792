"""enroot's command lines as they are rendered, and the runner with an enroot that only pretends."""

import shlex
from pathlib import Path

import pytest

from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import ResourceError, StartFailed
from agentfly.resources.runners.bubblewrap.root import Scratch
from agentfly.resources.runners.container import enroot
from agentfly.resources.runners.container.enroot import (
    CONF,
    EnrootRunner,
    Home,
    command,
    environment,
    fstab,
    uri,
)
from agentfly.resources.spec import ContainerSpec, PoolSpec

SANDBOXD = Path("/bin/true")
HOME = Home(Path("/r/7"), Path("/r/7/o"))


# 2, 3. What is run.


def test_command_gives_what_enroot_does_not_and_then_starts_it() -> None:
    folders = [Scratch("/tmp", "1777", 64)]
    daemon = ["--handover", "/.agentfly/owner/h"]
    argv = command("/usr/bin/enroot", Path("/r/roots/ab"), HOME, False, folders, daemon)
    before = argv.index("/bin/sh")
    assert argv[:before] == [
        *("unshare", "--user", "--map-user=1000", "--map-group=1000", "--keep-caps"),
        *("--pid", "--fork", "--kill-child", "--mount-proc"),
        *("--mount", "--propagation", "slave", "--ipc", "--uts", "--net", "--"),
    ]
    after = argv.index("/usr/bin/enroot")
    assert argv[before : before + 2] == ["/bin/sh", "-ec"]
    assert argv[before + 3 : after] == [
        *("sh", "/r/roots/ab", "/r/7/upper", "/r/7/work", "/r/7/data/r", "/r/7/mq"),
        *("/proc", "/dev", "/.agentfly/owner", "/tmp", "--"),
    ]
    assert argv[after:] == [
        *("/usr/bin/enroot", "start", "--rw", "--conf", "/r/7/settings/sandbox.conf"),
        *("--env", "SHELL=/.agentfly/sandboxd"),
        *("r", "/.agentfly/sandboxd", "--handover", "/.agentfly/owner/h"),
    ]


def test_network_of_the_machine_only_when_asked_for() -> None:
    assert "--net" not in command("enroot", Path("/r"), HOME, True, [], [])


def test_mounts_are_enroots_own_format() -> None:
    lines = fstab(SANDBOXD, HOME, [Path("/dev/null")], 16, [Scratch("/tmp", "1777", 64)]).splitlines()
    assert lines == [
        "/proc /proc none x-create=dir,rbind,rw,nosuid,nodev,noexec,rslave 0 -1",
        "none /proc none remount,bind,ro,nosuid,nodev,noexec 0 -1",
        "tmpfs /dev tmpfs x-create=dir,rw,nosuid,noexec,mode=755,size=1m 0 -1",
        "/dev/null /dev/null none x-create=file,bind,rw,nosuid,noexec,private 0 -1",
        "devpts /dev/pts devpts x-create=dir,rw,nosuid,noexec,newinstance,ptmxmode=0666,mode=620 0 -1",
        "/r/7/mq /dev/mqueue none x-create=dir,bind,rw,nosuid,noexec,private,nodev 0 -1",
        "tmpfs /dev/shm tmpfs x-create=dir,rw,nosuid,nodev,mode=1777,size=16m 0 -1",
        "tmpfs /tmp tmpfs x-create=dir,rw,nosuid,nodev,mode=1777,size=64m 0 -1",
        "/bin/true /.agentfly/sandboxd none x-create=file,bind,ro,nosuid,nodev,private 0 -1",
        "/r/7/o /.agentfly/owner none x-create=dir,bind,ro,nosuid,nodev,noexec,private 0 -1",
        "none /dev none remount,ro,nosuid,noexec 0 -1",
    ]


def test_nothing_of_the_machines_enroot_or_of_our_environment_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENROOT_ALLOW_SUPERUSER", "yes")
    monkeypatch.setenv("SECRET", "token")
    home = Home(tmp_path, tmp_path / "o")
    home.prepare("mounts\n")
    environ = home.environ()
    assert not {"SECRET", "ENROOT_ALLOW_SUPERUSER"} & set(environ)
    assert environ["ENROOT_SYSCONF_PATH"] == str(tmp_path / "settings")
    assert not Path(environ["ENROOT_CONFIG_PATH"]).exists()
    assert [path.name for path in sorted(home.settings.rglob("*"))] == [
        *("mounts.d", "sandbox.fstab", "sandbox.conf")
    ]
    assert (home.settings / "sandbox.conf").read_text() == CONF


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("debian:12", "docker://debian:12"),
        ("team/image", "docker://team/image"),
        ("registry.example/team/image:1", "docker://registry.example#team/image:1"),
        ("localhost/image", "docker://localhost#image"),
        ("host:5000/a/b@sha256:00", "docker://host:5000#a/b@sha256:00"),
        ("podman://localhost/image", "podman://localhost/image"),
        ("docker://user@nvcr.io#nvidia/x", "docker://user@nvcr.io#nvidia/x"),
    ],
)
def test_name_of_an_image_is_enroots_uri(image: str, expected: str) -> None:
    assert uri(image) == expected


def test_environment_of_an_imported_image_is_read(tmp_path: Path) -> None:
    assert environment(tmp_path) == {}
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/environment").write_text('PATH=/opt/bin:/bin\nA="b c"\n# comment\n1=2\nEMPTY=\n')
    assert environment(tmp_path) == {"PATH": "/opt/bin:/bin", "A": "b c", "EMPTY": ""}


# 4. What is missing.


def pretend(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """An enroot that notes how it was called, and then does this."""
    path = folder / "enroot"
    path.write_text(f'#!/bin/sh\necho "$*" >> {shlex.quote(str(folder))}/calls\n{body}\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin:/usr/sbin")
    return folder / "calls"


def runner(folder: Path) -> EnrootRunner:
    return EnrootRunner(folder / "r", SANDBOXD)


def test_machine_without_enroot_refuses_the_pool_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    pool = PoolSpec(name="swe", resource=ContainerSpec(runtime="enroot", image="debian:12"))
    with pytest.raises(ResourceError) as caught:
        ResourceEngine([runner(tmp_path)]).add_pool(pool)
    assert str(caught.value) == (
        "pool swe: runner enroot cannot work here: enroot: not found on PATH; install enroot"
    )


def test_enroot_that_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path, monkeypatch, 'echo "Unsupported bash version: 3" >&2; exit 1')
    assert runner(tmp_path).check() == "enroot version: Unsupported bash version: 3"


def test_first_sandbox_that_fails_is_told_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = 'case "$1" in start) echo "enroot-mount: failed to mount" >&2; exit 1;; esac'
    pretend(tmp_path, monkeypatch, body)
    problem = runner(tmp_path).check() or ""
    assert problem.startswith("a first sandbox: ")
    assert "it needs user namespaces and overlays in them (Linux 5.11)" in problem
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calls", "enroot"]


async def test_start_without_enroot_fails_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartFailed, match="enroot: not found on PATH"):
        await runner(tmp_path).start(ContainerSpec(runtime="enroot", image="debian:12"), "m-1")


# 1, 2. Images.


async def started(folder: Path, image: str) -> None:
    made = runner(folder)
    made._enroot = str(folder / "enroot")
    try:
        await made.start(ContainerSpec(runtime="enroot", image=image), "m-1")
    finally:
        await made.close()


async def test_image_is_imported_and_unpacked_by_its_documented_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = pretend(tmp_path, monkeypatch, 'case "$1" in create) echo "[ERROR] no space" >&2; exit 1;; esac')
    with pytest.raises(StartFailed, match=r"image: debian:12: \[ERROR\] no space"):
        await started(tmp_path, "debian:12")
    imported, created = calls.read_text().splitlines()
    file = imported.split()[2]
    assert imported == f"import --output {file} docker://debian:12"
    assert created == f"create --name {Path(file).stem} {file}"
    assert not (tmp_path / "r").exists()


async def test_squash_file_is_unpacked_without_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = pretend(tmp_path, monkeypatch, 'echo "[ERROR] no such file" >&2; exit 1')
    with pytest.raises(StartFailed, match="no such file"):
        await started(tmp_path, "/images/x.sqsh")
    (created,) = calls.read_text().splitlines()
    assert created.startswith("create --name ")
    assert created.endswith(" /images/x.sqsh")


@pytest.mark.parametrize("image", ["tar:{}/a.tar", "{}/a,b", "/nowhere"])
async def test_image_that_enroot_cannot_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str
) -> None:
    pretend(tmp_path, monkeypatch, "exit 0")
    (tmp_path / "a.tar").touch()
    (tmp_path / "a,b").mkdir()
    with pytest.raises(StartFailed, match="image: ") as caught:
        await started(tmp_path, image.format(tmp_path))
    assert caught.value.hints


async def test_failed_start_gives_enroots_words_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(tmp_path, monkeypatch, 'echo "[ERROR] Command not found: awk" >&2; exit 1')
    monkeypatch.setattr(
        enroot, "SETUP", 'while test "$1" != --; do shift; done; shift; exec "$@"'
    )  # the overlay is not enroot's doing
    (tmp_path / "root").mkdir()
    with pytest.raises(StartFailed) as caught:
        await started(tmp_path, f"dir:{tmp_path}/root")
    assert caught.value.reason == "[ERROR] Command not found: awk"
    assert not (tmp_path / "r").exists()
