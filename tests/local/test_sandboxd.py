"""The daemon's rules, asked of the real one in a real sandbox."""

import asyncio
import json
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest

from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.sandbox import SandboxClient, SandboxError, SandboxLeaseLost, SandboxUnreachable
from tests.local.boxes import TOKEN, Box, box


@pytest.fixture
async def leased(runner: BubblewrapRunner) -> AsyncIterator[Box]:
    async with box(runner) as made:
        yield made


# Commands.


async def test_exit_code_is_a_result(leased: Box) -> None:
    result = await leased.client.exec("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.signal, result.stdout, result.stderr) == (3, None, "out\n", "err\n")
    assert (result.timed_out, result.oom, result.stdout_truncated, result.stderr_truncated) == (False,) * 4
    assert 0 < result.wall_s < 5


async def test_arguments_pass_without_a_shell(leased: Box) -> None:
    result = await leased.client.exec(["printf", "%s|", "a b", "$HOME", "'"])
    assert result.stdout == "a b|$HOME|'|"


async def test_unknown_command_is_127(leased: Box) -> None:
    assert (await leased.client.exec(["no-such-command"])).exit_code == 127
    assert (await leased.client.exec(["/no/such/command"])).exit_code == 127
    assert (await leased.client.exec("no-such-command")).exit_code == 127


async def test_file_without_permission_is_126(leased: Box) -> None:
    assert (await leased.client.exec(["/usr/lib/os-release"])).exit_code == 126


async def test_signal_that_ended_it_is_told(leased: Box) -> None:
    result = await leased.client.exec("kill -TERM $$")
    assert (result.exit_code, result.signal) == (143, 15)


async def test_environment_is_path_spec_and_request(leased: Box) -> None:
    names = {line.split("=")[0] for line in (await leased.sh("env", env={"MINE": "1"})).splitlines()}
    assert names == {"PATH", "HOME", "LANG", "PYTHONDONTWRITEBYTECODE", "PWD", "MINE"}


async def test_stdin_cwd_and_unread_stdin(leased: Box) -> None:
    assert await leased.sh("pwd; cat", stdin="words", cwd="/tmp") == "/tmp\nwords"
    assert (await leased.client.exec("true", stdin="x" * 1_000_000)).exit_code == 0
    assert await leased.sh("pwd") == "/workspace\n"


async def test_missing_cwd_is_named(leased: Box) -> None:
    with pytest.raises(SandboxError, match="cwd: /nowhere is not a folder") as caught:
        await leased.client.exec("true", cwd="/nowhere")
    assert caught.value.code == "BadRequest"


async def test_output_that_is_not_text_is_replaced(leased: Box) -> None:
    assert await leased.sh(r"printf 'a\377b'") == "a\ufffdb"


async def test_flood_is_cut_marked_and_drained(leased: Box) -> None:
    result = await leased.client.exec("yes | head -c 50000000; echo end >&2", output_limit=1000)
    assert (len(result.stdout), result.stdout_truncated) == (1000, True)
    assert (result.stderr, result.stderr_truncated, result.exit_code) == ("end\n", False, 0)
    assert "[stdout: the rest was dropped]" in result.text


async def test_flood_leaves_the_daemon_small(leased: Box) -> None:
    floods = [leased.client.exec("yes | head -c 30000000", output_limit=1 << 20) for _ in range(8)]
    assert all(result.stdout_truncated for result in await asyncio.gather(*floods))
    status = await leased.sh("cat /proc/1/status")
    peak_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak_kb < 150_000


async def test_timeout_kills_the_group(leased: Box) -> None:
    began = time.monotonic()
    result = await leased.client.exec("sleep 77 & (sleep 77 & sleep 77) ; wait", timeout=0.3)
    assert (result.timed_out, result.signal) == (True, 9)
    assert time.monotonic() - began < 3
    assert (await leased.client.exec("pgrep -x sleep")).stdout == ""


async def test_background_process_does_not_block_the_answer(leased: Box) -> None:
    began = time.monotonic()
    result = await leased.client.exec("(sleep 60; echo late) & echo now")
    assert (result.stdout, result.exit_code) == ("now\n", 0)
    assert time.monotonic() - began < 2
    assert (await leased.client.exec("pgrep -x sleep")).exit_code == 0


async def test_background_process_may_go_on_writing(leased: Box) -> None:
    await leased.client.exec("(sleep 0.5; echo late; echo alive > /tmp/proof) &")
    await leased.sh("sleep 0.8; cat /tmp/proof")


async def test_disconnect_kills_the_command(leased: Box) -> None:
    call = asyncio.create_task(leased.client.exec("sleep 88", timeout=60))
    await leased.sh("until pgrep -fx 'sleep 88'; do sleep 0.02; done")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await leased.sh("while pgrep -fx 'sleep 88'; do sleep 0.02; done", timeout=3)


async def test_orphans_are_reaped(leased: Box) -> None:
    await leased.sh("for i in $(seq 30); do setsid sh -c 'exit 0' & done; wait")
    await leased.sh("sleep 0.1")
    states = await leased.sh("cat /proc/[0-9]*/stat")
    assert ") Z " not in states


async def test_cpu_time_is_counted(leased: Box) -> None:
    result = await leased.client.exec("python3 -c 'x = sum(range(10_000_000))'", timeout=60)
    assert 0.05 < result.cpu_s < 30


async def test_seventeenth_command_at_once_is_busy(leased: Box) -> None:
    calls = [asyncio.create_task(leased.client.exec("sleep 1")) for _ in range(17)]
    ended = await asyncio.gather(*calls, return_exceptions=True)
    refused = [error for error in ended if isinstance(error, SandboxError)]
    assert [error.code for error in refused] == ["Busy"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "exactly one"),
        ({"command": "true", "argv": ["true"]}, "exactly one"),
        ({"argv": [""]}, "argv"),
        ({"command": "true", "timeoutSeconds": 0}, "timeoutSeconds"),
        ({"command": "true", "timeoutSeconds": 1e9}, "timeoutSeconds"),
        ({"command": "true", "outputLimitBytes": -1}, "outputLimitBytes"),
        ({"command": "true", "outputLimitBytes": 1 << 30}, "outputLimitBytes"),
        ({"command": "true", "env": {"A=B": "c"}}, "env"),
        ({"command": "true", "surprise": 1}, "surprise"),
    ],
)
async def test_bad_request_names_the_field(leased: Box, body: dict[str, object], words: str) -> None:
    status, answer = await _raw(leased, "POST", "/exec", TOKEN, body)
    assert (status, answer["error"]["code"]) == (400, "BadRequest")
    assert words in answer["error"]["message"]


# Files.


async def test_file_comes_back_as_written(leased: Box) -> None:
    data = bytes(range(256)) * 40_000
    await leased.client.write_file("/workspace/deep/er/x.bin", data, 0o750)
    assert await leased.client.read_file("/workspace/deep/er/x.bin") == data
    assert await leased.sh("stat -c '%a %s' deep/er/x.bin") == f"750 {len(data)}\n"
    await leased.client.write_file("/workspace/deep/er/x.bin", b"short")
    assert await leased.client.read_file("/workspace/deep/er/x.bin") == b"short"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/workspace/none", "NotFound"),
        ("/workspace", "BadRequest"),
        ("relative", "BadRequest"),
        ("/dev/zero", "BadRequest"),
        ("/proc/self/environ", "BadRequest"),
        ("/workspace/pipe", "BadRequest"),
        ("/workspace/link", "BadRequest"),
        ("/workspace/big", "TooLarge"),
    ],
)
async def test_what_is_no_ordinary_file_cannot_be_read(leased: Box, path: str, code: str) -> None:
    await leased.sh("mkfifo pipe; ln -s /proc/self/environ link; truncate -s 70000000 big")
    with pytest.raises(SandboxError) as caught:
        await leased.client.read_file(path)
    assert caught.value.code == code


async def test_file_above_the_limit_is_refused_untouched(leased: Box) -> None:
    await leased.client.write_file("/workspace/x", b"old")
    with pytest.raises((SandboxError, SandboxUnreachable)):
        await leased.client.write_file("/workspace/x", bytes((64 << 20) + 1))
    assert await leased.client.read_file("/workspace/x") == b"old"


async def test_full_disk_is_an_error_not_a_dead_daemon(leased: Box) -> None:
    with pytest.raises(SandboxError, match="no space left"):
        await leased.client.write_file("/dev/shm/x", bytes(30 << 20))
    assert await leased.sh("echo alive") == "alive\n"


# Leases.


async def test_routes_need_their_token(leased: Box) -> None:
    exec_body: dict[str, object] = {"command": "true"}
    lease_body: dict[str, object] = {"owner": "x", "attempt": 0, "token": "t", "ttlSeconds": 5}
    for method, path, token, body in (
        ("POST", "/exec", None, exec_body),
        ("POST", "/lease", None, lease_body),
        ("POST", "/lease", TOKEN, lease_body),
        ("POST", "/reset", None, {}),
        ("POST", "/reset", TOKEN, {}),
        ("GET", "/files?path=/etc/passwd", None, {}),
        ("PUT", "/files?path=/tmp/x", None, {}),
    ):
        status, answer = await _raw(leased, method, path, token, body)
        assert (status, answer["error"]["code"]) == (401, "Unauthorized"), (method, path)
    status, answer = await _raw(leased, "GET", "/nothing", TOKEN, {})
    assert (status, answer["error"]["code"]) == (404, "NotFound")


async def test_wrong_lease_token_is_a_lost_lease(leased: Box) -> None:
    async with SandboxClient(leased.member.address, "other") as client:
        with pytest.raises(SandboxLeaseLost):
            await client.exec("true")
        with pytest.raises(SandboxLeaseLost):
            await client.read_file("/etc/passwd")


async def test_admin_token_runs_no_commands(leased: Box) -> None:
    async with SandboxClient(leased.member.address, leased.member.admin_token) as client:
        with pytest.raises(SandboxLeaseLost):
            await client.exec("true")


async def test_other_owner_is_busy_and_same_one_renews(leased: Box) -> None:
    for owner, attempt, token in (("other", 0, "t"), ("first", 1, TOKEN), ("first", 0, "t")):
        with pytest.raises(SandboxError) as caught:
            await leased.admin.lease(owner, attempt, token, 5)
        assert caught.value.code == "Busy"
    await leased.admin.lease("first", 0, TOKEN, 3000)
    health = await leased.admin.health()
    assert (health.state, health.owner, health.leases) == ("leased", "first", 1)
    assert health.expires_in_s is not None
    assert 2990 < health.expires_in_s <= 3000


async def test_health_needs_no_token_and_counts(leased: Box) -> None:
    async with SandboxClient(leased.member.address, "nothing") as client:
        health = await client.health()
    assert (health.state, health.incarnation, health.leases, health.owner) == ("leased", 1, 1, "first")
    assert health.idle_s < 5
    assert health.version


async def test_lease_without_heartbeat_is_lost_and_everything_killed(leased: Box) -> None:
    await leased.client.exec("setsid sleep 99 & setsid setsid sh -c 'trap \"\" TERM; sleep 99' &")
    running = asyncio.create_task(leased.client.exec("sleep 66", timeout=60))
    await asyncio.sleep(0.1)
    await leased.admin.lease("first", 0, TOKEN, 0.3)
    with pytest.raises(SandboxLeaseLost):
        await running
    with pytest.raises(SandboxLeaseLost):
        await leased.client.exec("true")
    with pytest.raises(SandboxLeaseLost):
        await leased.client.write_file("/tmp/x", b"")
    health = await leased.admin.health()
    assert (health.state, health.owner, health.expires_in_s) == ("dirty", None, None)
    with pytest.raises(SandboxError) as caught:
        await leased.admin.lease("first", 0, TOKEN, 30)
    assert caught.value.code == "Dirty"


async def test_heartbeats_keep_a_lease(leased: Box) -> None:
    for _ in range(5):
        await leased.admin.lease("first", 0, TOKEN, 0.5)
        await asyncio.sleep(0.2)
    assert (await leased.client.exec("true")).exit_code == 0


async def test_reset_during_a_command_ends_it_as_a_lost_lease(leased: Box) -> None:
    running = asyncio.create_task(leased.client.exec("sleep 66", timeout=60))
    await asyncio.sleep(0.1)
    assert (await leased.admin.reset()).clean
    with pytest.raises(SandboxLeaseLost):
        await running


async def test_reset_does_not_wait_for_a_stalled_upload(leased: Box) -> None:
    reader, writer = await asyncio.open_unix_connection(leased.member.address.removeprefix("unix://"))
    head = f"PUT /files?path=/tmp/half HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    writer.write(f"{head}Content-Length: 1000\r\n\r\nhalf".encode())
    await writer.drain()
    await asyncio.sleep(0.1)
    async with asyncio.timeout(3):
        assert (await leased.admin.reset()).clean
        assert b"410" in await reader.readline()
    writer.close()


async def test_token_opens_nothing_after_a_reset(leased: Box) -> None:
    assert (await leased.admin.reset()).clean
    health = await leased.admin.health()
    assert (health.state, health.incarnation) == ("free", 2)
    with pytest.raises(SandboxLeaseLost):
        await leased.client.exec("true")
    await leased.admin.lease("second", 0, "fresh", 30)
    with pytest.raises(SandboxLeaseLost):
        await leased.client.exec("true")


async def test_expired_sandbox_is_free_again_after_a_clean_reset(leased: Box) -> None:
    await leased.admin.lease("first", 0, TOKEN, 0.1)
    await asyncio.sleep(0.3)
    assert (await leased.admin.reset()).clean
    assert (await leased.admin.health()).state == "free"


async def test_residue_makes_it_dirty_for_ever(leased: Box) -> None:
    await leased.sh("echo x > /etc/residue")
    report = await leased.admin.reset()
    assert (report.clean, report.reason) == (False, "upper: /etc/residue was written")
    again = await leased.admin.reset()
    assert (again.clean, again.reason) == (report.clean, report.reason)
    assert (await leased.admin.health()).state == "dirty"


async def test_clean_reset_is_fast(leased: Box) -> None:
    seconds = []
    for _ in range(30):
        began = time.perf_counter()
        assert (await leased.admin.reset()).clean
        seconds.append(time.perf_counter() - began)
        await leased.admin.lease("again", 0, TOKEN, 30)
    assert sorted(seconds)[15] < 0.05


async def _raw(
    leased: Box, method: str, path: str, token: str | None, body: dict[str, object]
) -> tuple[int, dict[str, dict[str, str]]]:
    connector = aiohttp.UnixConnector(leased.member.address.removeprefix("unix://"))
    async with aiohttp.ClientSession(connector=connector) as session:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        data = json.dumps(body).encode() if method != "GET" else None
        async with session.request(method, f"http://s{path}", data=data, headers=headers) as answer:
            return answer.status, await answer.json()
