"""The process: what it is told and cannot use."""

import os
import subprocess
import sys

import pytest


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "agentfly_operator", *arguments]
    given = {**os.environ, **environment}
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=60, check=False)


# 3. flags and variables


@pytest.mark.parametrize(
    ("arguments", "environment", "text"),
    [
        ((), {}, "one of the arguments --all-namespaces/-A --namespace/-n is required"),
        (("-A", "-n", "team"), {}, "not allowed with argument"),
        (
            ("-A", "--listen", "here"),
            {},
            "--listen: here is not HOST:PORT\n  hint: write it as in 0.0.0.0:8080",
        ),
        (
            ("-A",),
            {"AGENTFLY_DNS_CIDRS": "dns"},
            "AGENTFLY_DNS_CIDRS: 'dns' does not appear to be an IPv4 or IPv6 network\n  hint: ",
        ),
    ],
)
def test_what_cannot_be_used_is_told_with_a_remedy(
    arguments: tuple[str, ...], environment: dict[str, str], text: str
) -> None:
    ended = run(*arguments, **environment)
    assert ended.returncode == 2
    assert text in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_kubeconfig_that_is_not_there_is_told_in_a_line() -> None:
    ended = run("-A", "--listen", "127.0.0.1:0", KUBECONFIG="/nowhere/config")
    assert ended.returncode == 1
    assert "kubeconfig: /nowhere/config cannot be used" in ended.stderr
    assert "Traceback" not in ended.stderr
