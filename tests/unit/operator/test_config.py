"""The operator's environment."""

import pytest

from agentfly_operator.config import Config, ConfigError


def test_without_variables_there_are_defaults() -> None:
    config = Config.from_environment({})
    assert (config.image, config.sandboxd_image) == ("agentfly/agentfly:dev", "agentfly/sandboxd:dev")
    assert (config.trainer_image, config.inference_image) == (
        "agentfly/trainer:dev",
        "agentfly/inference:dev",
    )
    assert config.colocated_image == "agentfly/colocated:dev"
    assert config.namespace == "agentfly-system"
    assert config.broker_of("team") == "http://agentfly-broker.team.svc:7080"


def test_variables_are_read() -> None:
    config = Config.from_environment(
        {
            "AGENTFLY_IMAGE": "a",
            "AGENTFLY_SANDBOXD_IMAGE": "s",
            "AGENTFLY_IMAGE_PULL_POLICY": "Never",
            "POD_NAMESPACE": "ops",
            "POD_NAME": "operator-1",
            "AGENTFLY_DNS_CIDRS": "10.96.0.10/32, fd00::a/128",
            "AGENTFLY_BROKER_URL": "http://127.0.0.1:1/",
            "AGENTFLY_IN_PROCESS_MODULES": "games",
            "AGENTFLY_TRAINER_IMAGE": "t",
            "AGENTFLY_INFERENCE_IMAGE": "v",
            "AGENTFLY_COLOCATED_IMAGE": "c",
        }
    )
    assert config == Config(
        image="a", sandboxd_image="s", pull_policy="Never", namespace="ops", identity="operator-1",
        dns_cidrs=("10.96.0.10/32", "fd00::a/128"),
        in_process_modules="games", broker_url="http://127.0.0.1:1", trainer_image="t", inference_image="v",
        colocated_image="c",
    )  # fmt: skip
    assert config.broker_of("team") == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("AGENTFLY_IMAGE_PULL_POLICY", "often", "'often' is no pull policy"),
        ("AGENTFLY_DNS_CIDRS", "10.0.0.1/24", "10.0.0.1/24 has host bits set"),
        ("AGENTFLY_DNS_CIDRS", "kube", "'kube' does not appear to be an IPv4 or IPv6 network"),
    ],
)
def test_a_value_of_no_use_is_refused_with_a_remedy(name: str, value: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_environment({name: value})
    assert caught.value.message.startswith(f"{name}: ")
    assert text in caught.value.message
    assert caught.value.hints
