import base64
import ssl
import subprocess
import sys

import pytest
import yaml

from agentfly.kube.access import KubeconfigLogin, PodLogin, find_login
from agentfly.kube.errors import KubeError

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A certificate and its key."""
    folder = tmp_path_factory.mktemp("pki")
    for name in ("one", "two"):
        subprocess.run(
            [
                *["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"],
                *["-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt"],
            ],
            check=True,
            capture_output=True,
        )
    return folder


@pytest.fixture
def account(tmp_path, authority):
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("rl")
    (tmp_path / "ca.crt").write_bytes((authority / "one.crt").read_bytes())
    return tmp_path


def test_pod_uses_its_service_account(account):
    access = find_login(environment=POD, service_account=account).read()
    assert (access.server, access.namespace) == ("https://10.96.0.1:443", "rl")
    assert access.authorization == "Bearer first"
    assert isinstance(access.tls, ssl.SSLContext)
    assert access.tls.verify_mode == ssl.CERT_REQUIRED


def test_pod_address_of_ipv6_is_bracketed(account):
    environment = POD | {"KUBERNETES_SERVICE_HOST": "fd00::1"}
    assert (
        find_login(environment=environment, service_account=account).read().server == "https://[fd00::1]:443"
    )


def test_each_reading_gives_what_is_there_now(account, authority):
    login = PodLogin(account, POD)
    first = login.read()
    (account / "token").write_text("second")
    second = login.read()
    assert second.authorization == "Bearer second"
    assert second.tls is first.tls
    (account / "ca.crt").write_bytes((authority / "two.crt").read_bytes())
    assert login.read().tls is not first.tls


def test_pod_without_a_token_says_what_it_needs(tmp_path):
    with pytest.raises(KubeError, match=str(tmp_path)) as caught:
        find_login(environment=POD, service_account=tmp_path).read()
    assert "automountServiceAccountToken" in caught.value.hints[0]


PROGRAM = """
import json, pathlib
count = pathlib.Path({count!r})
n = len(count.read_text()) if count.exists() else 0
count.write_text("x" * (n + 1))
kind = {{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}}
print(json.dumps(kind | {{"status": {{"token": f"token-{{n}}"}}}}))
"""


def config(authority, user, namespace="team"):
    data = base64.b64encode((authority / "one.crt").read_bytes()).decode()
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "main",
        "clusters": [
            {
                "name": "c",
                "cluster": {"server": "https://example.test:6443/", "certificate-authority-data": data},
            },
            {"name": "plain", "cluster": {"server": "http://127.0.0.1:8001"}},
        ],
        "users": [{"name": "u", "user": user}],
        "contexts": [
            {"name": "main", "context": {"cluster": "c", "user": "u", "namespace": namespace}},
            {"name": "other", "context": {"cluster": "plain", "user": "u"}},
        ],
    }


@pytest.fixture
def kubeconfig(tmp_path, authority):
    def write(user, name="config"):
        path = tmp_path / name
        path.write_text(yaml.safe_dump(config(authority, user)))
        return path

    return write


def test_kubeconfig_with_a_token(kubeconfig):
    access = find_login(kubeconfig({"token": "secret"}), environment={}).read()
    assert (access.server, access.namespace) == ("https://example.test:6443", "team")
    assert access.authorization == "Bearer secret"


def test_kubeconfig_with_certificates(kubeconfig, authority):
    user = {"client-certificate": str(authority / "two.crt"), "client-key": str(authority / "two.key")}
    login = find_login(kubeconfig(user), environment={})
    access = login.read()
    assert access.authorization == ""
    assert isinstance(access.tls, ssl.SSLContext)
    assert login.read().tls is access.tls


def test_kubeconfig_with_a_program_is_asked_again(kubeconfig, tmp_path):
    count = tmp_path / "count"
    program = tmp_path / "login.py"
    program.write_text(PROGRAM.format(count=str(count)))
    user = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": [str(program)],
            "interactiveMode": "Never",
        }
    }
    login = find_login(kubeconfig(user), environment={})
    assert [login.read().authorization for _ in range(2)] == ["Bearer token-0", "Bearer token-1"]


def test_context_may_be_named(kubeconfig):
    access = find_login(kubeconfig({"token": "t"}), "other", environment={}).read()
    assert (access.server, access.namespace, access.tls) == ("http://127.0.0.1:8001", "default", None)


def test_named_config_comes_before_the_environment_and_that_before_the_pod(kubeconfig, account):
    one, two = kubeconfig({"token": "1"}, "one"), kubeconfig({"token": "2"}, "two")
    both = POD | {"KUBECONFIG": str(two)}
    assert find_login(one, environment=both, service_account=account).read().authorization == "Bearer 1"
    assert find_login(environment=both, service_account=account).read().authorization == "Bearer 2"
    assert isinstance(find_login(environment=POD, service_account=account), PodLogin)
    assert isinstance(find_login(environment={}), KubeconfigLogin)


@pytest.mark.parametrize("text", [None, "{}", "current-context: x", "a: [", "users: 5"])
def test_kubeconfig_that_cannot_be_used_names_its_path(tmp_path, text):
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)
    with pytest.raises(KubeError, match=str(path)) as caught:
        find_login(path, environment={}).read()
    assert caught.value.hints


def test_unknown_context_is_named(kubeconfig):
    with pytest.raises(KubeError, match="nowhere"):
        find_login(kubeconfig({"token": "t"}), "nowhere", environment={}).read()


def test_kubernetes_package_is_needed_for_a_kubeconfig_only(kubeconfig, account, monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes.config", None)
    find_login(environment=POD, service_account=account).read()
    with pytest.raises(KubeError, match="not installed") as caught:
        find_login(kubeconfig({"token": "t"}), environment={}).read()
    assert "agentfly[operator]" in caught.value.hints[0]
