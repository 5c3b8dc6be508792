"""verl's critic with the attention that the run says; runs in the trainer environment.

verl 0.9 asks for flash attention by name where it loads a critic, and takes its absence for a model that can
have no value head.
"""

from typing import Any

from verl.utils import model


def register() -> None:
    """Replace verl's loader. Safe to call again."""
    model.load_valuehead_model = load


def load(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    """The weights of a policy with a new head of one value for each token."""
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path, torch_dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )
