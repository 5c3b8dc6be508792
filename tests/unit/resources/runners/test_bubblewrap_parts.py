"""The parts of the sandbox runner that need no sandbox: command line, /etc, filter, owner's folder, hints."""

import errno
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.errors import AgentflyError
from agentfly.resources.errors import StartFailed
from agentfly.resources.runners.bubblewrap import check as bubblewrap_check
from agentfly.resources.runners.bubblewrap import host_root, seccomp
from agentfly.resources.runners.bubblewrap.root import Home, Root, hidden
from agentfly.resources.runners.guard import guarded
from agentfly.resources.runners.sandboxd import owner_dir
from agentfly.resources.spec import ContainerSpec


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir()
    (tmp_path / "dev").mkdir()
    return tmp_path


def command(base: Path, **fields: object) -> list[str]:
    root = Root(ContainerSpec(**fields), base, Path("/opt/sandboxd"), bounded=True)  # type: ignore[arg-type]
    root.check()
    return root.arguments(Home(base / "1"), {"user/max_inotify_instances": 7})


def after(argv: list[str], *words: str) -> bool:
    return any(tuple(argv[i : i + len(words)]) == words for i in range(len(argv)))


# The command line.


def test_sandbox_shares_nothing_and_keeps_no_power(base: Path) -> None:
    argv = command(base)
    for words in (
        ("--unshare-all",),
        ("--unshare-user",),
        ("--disable-userns",),
        ("--cap-drop", "ALL"),
        ("--new-session",),
        ("--as-pid-1",),
        ("--clearenv",),
        ("--remount-ro", "/proc"),
        ("--remount-ro", "/dev"),
        ("--remount-ro", "/"),
    ):
        assert after(argv, *words), words
    assert not {"--bind", "--share-net", "--cap-add", "--setenv"} & set(argv)


def test_network_is_shared_only_when_asked_for(base: Path) -> None:
    assert after(command(base, network=True), "--share-net")
    assert after(command(base, network=True), "--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf")


def test_read_only_comes_after_everything_that_is_put_there(base: Path) -> None:
    argv = command(base)
    assert argv[-2:] == ["--remount-ro", "/"]
    last_mount = max(i for i, word in enumerate(argv) if word in ("--tmpfs", "--mqueue", "--symlink"))
    assert argv.index("--remount-ro") > last_mount


def test_scratch_is_bounded_below_the_memory_of_the_spec(base: Path) -> None:
    for memory in (64, 256, 4096):
        root = Root(ContainerSpec(memory_mb=memory), base, Path("/x"), bounded=True)
        assert sum(scratch.size_mb for scratch in root.scratch()) < memory
        assert [scratch.path for scratch in root.scratch()][-1] == "/workspace"


def test_image_folder_is_overlaid_whole(base: Path) -> None:
    image = base / "image"
    (image / "app").mkdir(parents=True)
    (image / "app/main.py").touch()
    argv = command(base, image=str(image), workdir="/app")
    assert after(
        argv, "--overlay-src", str(image), "--overlay", str(base / "disk/upper"), str(base / "disk/work"), "/"
    )
    assert not after(argv, "--tmpfs", "/app")
    assert not after(argv, "--remount-ro", "/")
    assert after(command(base, image=str(image), workdir="/other"), "--tmpfs", "/other")


def test_root_is_written_to_memory_of_the_size_that_the_spec_gives(base: Path) -> None:
    argv = command(base, memory_mb=64, disk_mb=3)
    assert after(argv, "--size", str(3 << 20), "--tmpfs", f"/../oldroot{base}/disk")
    assert after(argv, "--overlay", str(base / "disk/upper/usr"), str(base / "disk/work/usr"), "/usr")
    assert after(command(base, memory_mb=64), "--size", str(64 << 20), "--tmpfs", f"/../oldroot{base}/disk")


def test_root_is_written_to_the_members_folder_where_memory_cannot_hold_it(base: Path) -> None:
    root = Root(ContainerSpec(), base, Path("/opt/sandboxd"), bounded=False)
    root.prepare(Home(base / "1"))
    argv = root.arguments(Home(base / "1"), {})
    assert after(argv, "--overlay", str(base / "1/upper/usr"), str(base / "1/work/usr"), "/usr")
    assert (base / "1/upper/usr").is_dir()


def test_what_root_alone_may_read_of_proc_is_hidden(tmp_path: Path) -> None:
    modes = {"kcore": 0o400, "keys": 0o444, "meminfo": 0o444, "42": 0o400, "trigger": 0o200}
    for name, mode in modes.items():
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    (tmp_path / "mounts").symlink_to("kcore")
    assert hidden(tmp_path) == ("kcore", "keys", "trigger")


def test_ceilings_are_set_before_proc_is_closed(base: Path) -> None:
    argv = command(base)
    file = "/proc/sys/user/max_inotify_instances"
    assert after(argv, "--file", "7", file)
    assert argv.index("--proc") < argv.index(file) < argv.index("--remount-ro")


@pytest.mark.parametrize("workdir", ["/", "/proc", "/proc/1", "/dev/x", "/tmp/x", "/run/a/b", "/.agentfly/x"])
def test_workdir_that_hides_a_part_is_refused(base: Path, workdir: str) -> None:
    with pytest.raises(StartFailed, match="workdir"):
        command(base, workdir=workdir)


@pytest.mark.parametrize("workdir", ["/tmp", "/root", "/workspace", "/a/b/c", "/usr/share", "/home/me"])
def test_other_workdirs_are_mounted_once(base: Path, workdir: str) -> None:
    argv = command(base, workdir=workdir)
    assert sum(argv[i : i + 2] == ["--tmpfs", workdir] for i in range(len(argv))) <= 1


# What of this machine's /etc is shown.


def test_etc_is_copied_without_what_only_root_reads(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for folder in ("ssl/certs", "ssl/private", "python3.11", "ssh"):
        (source / folder).mkdir(parents=True)
    files = {"shadow": 0o640, "nsswitch.conf": 0o644, "ssl/certs/a.pem": 0o644, "ssl/private/key": 0o600}
    for name, mode in files.items() | {("ssh/key", 0o644), ("pip.conf", 0o644), ("passwd", 0o644)}:
        (source / name).write_text("of the machine")
        (source / name).chmod(mode)
    (source / "ssl/private").chmod(0o700)
    (source / "localtime").symlink_to("/usr/share/zoneinfo/UTC")
    host_root.build_etc(tmp_path / "etc", source)
    made = {str(path.relative_to(tmp_path / "etc")) for path in (tmp_path / "etc").rglob("*")}
    assert made == {"nsswitch.conf", "ssl", "ssl/certs", "ssl/certs/a.pem", "python3.11", "localtime"} | set(
        host_root.WRITTEN
    )
    assert (tmp_path / "etc/passwd").read_text().startswith("root:x:0:0:")
    assert (tmp_path / "etc/localtime").readlink() == Path("/usr/share/zoneinfo/UTC")


def test_what_is_shared_is_built_once(base: Path) -> None:
    host_root.build(base)
    assert list((base / "etc").iterdir()) == []  # it was there


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_devices_of_roots_sandboxes_belong_to_nobody(tmp_path: Path) -> None:
    host_root.build_devices(tmp_path / "dev")
    for device in (tmp_path / "dev").iterdir():
        assert device.stat().st_uid == host_root.NOBODY
        assert device.is_char_device()


# The filter of system calls.


def verdict(code: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Run the filter as the kernel does."""
    steps = [struct.unpack("=HBBI", code[i : i + 8]) for i in range(0, len(code), 8)]
    at, accumulator = 0, 0
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *[1] * (6 - len(arguments)))
    while True:
        operation, if_true, if_false, value = steps[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif operation == 0x54:
            accumulator &= value
        elif operation == 0x06:
            return int(value)
        else:
            holds = {
                0x15: accumulator == value,
                0x35: accumulator >= value,
                0x45: accumulator & value != 0,
            }[operation]
            at += if_true if holds else if_false


REFUSED = {"x86_64": (0xC000003E, 250), "aarch64": (0xC00000B7, 219)}


@pytest.mark.parametrize("machine", REFUSED)
@given(number=st.integers(0, 2**32 - 1))
def test_filter_refuses_what_is_listed_and_nothing_else(machine: str, number: int) -> None:
    audit, keyctl = REFUSED[machine]
    code = seccomp.program(machine)
    assert code is not None
    column = list(REFUSED).index(machine)
    calls = [(numbers[column], block) for _, numbers, block in seccomp._CALLS]
    passes = ("family", "limit", "map", "memory file")  # with these arguments
    listed = number in [call for call, block in calls if block not in passes]
    allowed = verdict(code, audit, number, 1, 1, 0) == 0x7FFF0000
    assert allowed is not (listed or number >= 0x40000000)
    assert verdict(code, audit, keyctl) == 0x00050000 | 1
    assert verdict(code, audit ^ 1, number) == 0x00050000 | 1


@pytest.mark.parametrize(("machine", "socket"), [("x86_64", 41), ("x86_64", 53), ("aarch64", 198)])
@given(family=st.integers(0, 2**32 - 1))
def test_filter_knows_the_families_of_a_network_namespace(machine: str, socket: int, family: int) -> None:
    code = seccomp.program(machine)
    assert code is not None
    refused = verdict(code, REFUSED[machine][0], socket, family) == 0x00050000 | errno.EAFNOSUPPORT
    assert refused is (family not in (1, 2, 10, 16))
    assert verdict(code, REFUSED[machine][0], socket, 1) == 0x7FFF0000


CLOSE_ON_EXEC, NONBLOCK = 0o2000000, 0o4000


@pytest.mark.parametrize(
    ("family", "protocols"), [(2, {0, 1, 6, 17, 58, 262}), (10, {0, 1, 6, 17, 58, 262}), (16, {0, 4, 15})]
)
@given(kind=st.integers(1, 10), protocol=st.integers(0, 300))
def test_filter_knows_the_protocols_that_need_no_module(
    family: int, protocols: set[int], kind: int, protocol: int
) -> None:
    code = seccomp.program("x86_64")
    assert code is not None
    flagged = kind | CLOSE_ON_EXEC | NONBLOCK
    wanted = protocol in protocols and (family == 16 or kind < 4)
    told = verdict(code, REFUSED["x86_64"][0], 41, family, flagged, protocol)
    assert told == (0x7FFF0000 if wanted else 0x00050000 | errno.EPROTONOSUPPORT)


OWN = {
    # call: arguments that concern the caller alone; then arguments that reach another process
    "sched_setscheduler": ([(0, 5)], [(1, 5), (2**31, 5)]),
    "sched_setattr": ([(0, 0)], [(1, 0)]),
    "setpriority": ([(0, 0, 19)], [(0, 1, 19), (1, 0, 19), (2, 0, 19), (2, 1, 19)]),
    "ioprio_set": ([(1, 0, 7)], [(1, 1, 7), (2, 0, 7), (3, 0, 7)]),
    "prlimit64": ([(0, 7, 4096), (1, 7, 0)], [(1, 7, 4096), (1, 7, 2**32), (9, 7, 2**63)]),
}


@pytest.mark.parametrize("machine", REFUSED)
@pytest.mark.parametrize("call", OWN)
def test_filter_lets_a_process_change_its_own_scheduling_and_limits_alone(machine: str, call: str) -> None:
    code, column = seccomp.program(machine), list(REFUSED).index(machine)
    assert code is not None
    (number,) = [numbers[column] for name, numbers, _ in seccomp._CALLS if name == call]
    own, others = OWN[call]
    assert {verdict(code, REFUSED[machine][0], number, *arguments) for arguments in own} == {0x7FFF0000}  # type: ignore[attr-defined]
    assert {verdict(code, REFUSED[machine][0], number, *arguments) for arguments in others} == {  # type: ignore[attr-defined]
        0x00050000 | errno.EPERM
    }


@pytest.mark.parametrize(("machine", "mmap", "memfd"), [("x86_64", 9, 319), ("aarch64", 222, 279)])
def test_filter_gives_no_huge_pages(machine: str, mmap: int, memfd: int) -> None:
    code, audit = seccomp.program(machine), REFUSED[machine][0]
    assert code is not None
    assert verdict(code, audit, mmap, 0, 1 << 21, 3, 0x22) == 0x7FFF0000
    assert verdict(code, audit, mmap, 0, 1 << 21, 3, 0x40022) == 0x00050000 | errno.ENOMEM
    assert verdict(code, audit, mmap, 0, 1 << 21, 3, 0x22 | 21 << 26) == 0x7FFF0000  # a size alone is ignored
    assert verdict(code, audit, memfd, 1, 1) == 0x7FFF0000
    assert verdict(code, audit, memfd, 1, 5) == 0x00050000 | errno.ENOMEM


def test_filter_lets_nobody_write_out_everything() -> None:
    code = seccomp.program("x86_64")
    assert code is not None
    assert {verdict(code, REFUSED["x86_64"][0], number) for number in (162, 306)} == {0x00050000}


def test_unknown_processor_has_no_filter() -> None:
    assert seccomp.program("riscv64") is None


# The folder of an owner.


async def test_owner_leaves_the_folder_as_it_found_it(tmp_path: Path) -> None:
    owner = owner_dir.OwnerDir(tmp_path / "r")
    home = owner.new_home(owner.new_name(), [])
    (home / "file").touch()
    owner.drop(home)
    owner.drop(home)
    assert not home.exists()
    await owner.close()
    assert os.listdir(tmp_path) == []


async def test_second_owner_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    first = owner_dir.OwnerDir(tmp_path / "r")
    with pytest.raises(AgentflyError, match="in use by another process"):
        owner_dir.OwnerDir(tmp_path / "r")
    await first.close()
    await owner_dir.OwnerDir(tmp_path / "r").close()


async def test_sweep_takes_the_dead_and_leaves_the_living(tmp_path: Path) -> None:
    living, group = owner_dir.OwnerDir(tmp_path / "living"), tmp_path / "group"
    dead = owner_dir.OwnerDir(tmp_path / "dead")
    group.mkdir()
    dead.new_home("1", [group, tmp_path / "gone"])
    (tmp_path / "foreign").mkdir()
    os.close(dead._lock)  # what the end of a process does
    assert owner_dir.sweep(tmp_path) == ["dead"]
    assert set(os.listdir(tmp_path)) == {"living", "foreign"}
    assert owner_dir.sweep(tmp_path) == []
    await living.close()


async def test_folder_of_a_dead_owner_is_used_around_what_is_left_in_it(tmp_path: Path) -> None:
    dead, group = owner_dir.OwnerDir(tmp_path / "r"), tmp_path / "group"
    group.mkdir()
    left = dead.new_home(dead.new_name(), [group])
    os.close(dead._lock)
    heir = owner_dir.OwnerDir(tmp_path / "r")
    home = heir.new_home(heir.new_name(), [])
    assert home != left
    heir.drop(home)
    await heir.close()
    assert (left.is_dir(), home.is_dir()) == (True, False)
    assert owner_dir.sweep(tmp_path) == ["r"]
    assert not group.exists()


def test_sweep_keeps_the_record_of_a_group_it_cannot_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_dir, "SWEEP_GROUP_S", 0.02)
    group = tmp_path / "group"
    (group / "busy").mkdir(parents=True)
    dead = owner_dir.OwnerDir(tmp_path / "dead")
    dead.new_home("1", [group])
    os.close(dead._lock)
    assert owner_dir.sweep(tmp_path) == []
    (group / "busy").rmdir()
    assert owner_dir.sweep(tmp_path) == ["dead"]
    assert not group.exists()


def test_folder_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AgentflyError, match="too long"):
        owner_dir.OwnerDir(tmp_path / ("x" * 100))


# Why it does not work here.

BWRAP, RUN = Path("/x/bwrap"), Path("/x/run")


@pytest.mark.parametrize(
    ("file", "value", "remedy"),
    [
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor profile with 'userns,' for /x/bwrap"),
    ],
)
def test_setting_in_the_way_is_named_with_its_remedy(
    tmp_path: Path, file: str, value: str, remedy: str
) -> None:
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(f"{value}\n")
    words = "bwrap: No permissions to create new namespace"
    reason = bubblewrap_check.explain(words, BWRAP, RUN, tmp_path)
    assert file.replace("/", ".") in reason
    assert remedy in reason


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("bwrap: setting up uid map: Permission denied", "seccomp profile"),
        (
            "bwrap: Can't make overlay mount on /newroot/usr: Invalid argument",
            "use a run_dir on a local disk",
        ),
        ("bwrap: something else", "something else"),
        ("", "no message"),
    ],
)
def test_other_reasons_are_told_as_far_as_known(tmp_path: Path, words: str, part: str) -> None:
    assert part in bubblewrap_check.explain(words, BWRAP, RUN, tmp_path)


@pytest.mark.parametrize(("version", "usable"), [("0.8.0", False), ("0.11.0", True), ("1.0", True)])
def test_bubblewrap_without_overlays_is_refused(tmp_path: Path, version: str, usable: bool) -> None:
    bwrap = tmp_path / "bwrap"
    bwrap.write_text(f"#!/bin/sh\necho bubblewrap {version}\n")
    bwrap.chmod(0o755)
    problem = bubblewrap_check.version_problem(bwrap)
    assert (problem is None) is usable
    assert "does not run" in (bubblewrap_check.version_problem(tmp_path / "none") or "")


def test_guards_and_sandboxes_use_the_same_bubblewrap(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "bwrap"
    other.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert guarded(["true"])[0] == str(bubblewrap_check.find_bubblewrap()) != str(other)
