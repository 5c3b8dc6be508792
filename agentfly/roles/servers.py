"""The servers of a run's policy, as the processes of the run are told of them."""

import os

from agentfly.roles.trainer import ENV_INFERENCE_URLS


def inference_urls() -> list[str]:
    """Base addresses, without a slash at the end, from the environment of this process."""
    return [url.rstrip("/") for url in os.environ[ENV_INFERENCE_URLS].split(",") if url]
