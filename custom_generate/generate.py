"""The Hub's door: `target.generate(..., custom_generate=<this repository>, trust_remote_code=True,
draft_model=<draft>)`.

This file is loaded alone, so it works through the objects it is given and imports nothing from the repository.
"""

from functools import lru_cache

from transformers import AutoModel

PUBLISHED_DRAFT = "RadixArk/Kimi-K3-DSpark"


@lru_cache(maxsize=1)
def published_draft(device):
    """The published draft of Kimi K3, kept for the next call."""
    return AutoModel.from_pretrained(PUBLISHED_DRAFT, trust_remote_code=True, dtype="auto", device_map={"": device})


def generate(model, draft_model=None, inputs=None, input_ids=None, **kwargs):
    """Generate with `model` as the target and `draft_model`, a loaded `DSparkDraftModel`, as the draft.

    Takes and returns what `DSparkDraftModel.generate` does; `inputs` is the prompt as `generate` names its first
    argument. Without `draft_model` the published draft of Kimi K3 is loaded.
    """
    if draft_model is None:
        draft_model = published_draft(model.device)
    if not hasattr(draft_model, "draft_block"):
        raise ValueError(
            f"`draft_model` is {type(draft_model).__name__}, but a DSparkDraftModel is needed: load it with "
            "AutoModel.from_pretrained(<draft repository>, trust_remote_code=True) and pass it as `draft_model=`."
        )
    return draft_model.generate(input_ids, target=model, inputs=inputs, **kwargs)
