import pytest

from agentfly.roles.servers import inference_urls
from agentfly.roles.trainer import ENV_INFERENCE_URLS


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("http://127.0.0.1:1", ["http://127.0.0.1:1"]),
        ("http://a:1/,http://b:2,", ["http://a:1", "http://b:2"]),
    ],
)
def test_addresses_are_split_and_have_no_slash_at_the_end(
    text: str, want: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_INFERENCE_URLS, text)
    assert inference_urls() == want
