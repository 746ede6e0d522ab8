"""What a call of `generate` asks for: validated, and prepared as transformers' own `generate` prepares it.

Generation config, logits processors and stopping criteria are built by transformers; what the loop does not support is
refused by name before any token is made. Where the versions of transformers differ in this preparation, the difference
is in this file.
"""

import copy
import inspect
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerationMixin
from transformers.generation.streamers import BaseStreamer

from .target_kimi_k3 import VerifiableTarget

# Fields of GenerationConfig that the loop honours; any other one that is not at its default is refused by name.
HONOURED_FIELDS = frozenset(
    """max_length max_new_tokens min_length min_new_tokens max_time stop_strings do_sample temperature top_k top_p top_h
    min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias
    output_scores output_logits return_dict_in_generate pad_token_id bos_token_id eos_token_id
    prefill_chunk_size""".split()
)
# Fields that mean nothing to a decoder run token by token, whatever their value.
INERT_FIELDS = frozenset({"transformers_version", "disable_compile", "decoder_start_token_id"})
# Arguments of the target's forward that a prompt may bring along: images of the multimodal Kimi K3.
PROMPT_INPUTS = ("pixel_values", "grid_thws")


@dataclass
class Request:
    """A validated call of `generate`, as the loop needs it. `inputs` go to the target's forward at prefill."""

    input_ids: torch.Tensor
    config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    streamer: BaseStreamer | None
    inputs: dict[str, torch.Tensor]


class _Preparation(GenerationMixin):
    """Lends transformers' own preparation of a `generate` call to any target.

    The multimodal Kimi K3 has no GenerationMixin unless an Auto class loaded it, so the target's cannot be relied on.
    """

    def __init__(self, config, generation_config: GenerationConfig, device: torch.device):
        self.config = config
        self.generation_config = copy.deepcopy(generation_config)
        self.device = device


def prepare_request(
    target: VerifiableTarget,
    input_ids,
    generation_config,
    logits_processor,
    stopping_criteria,
    prefix_allowed_tokens_fn,
    streamer,
    tokenizer,
    kwargs,
) -> Request:
    """Validate a call of `generate` and prepare its processors and criteria, as transformers' `generate` does."""
    check_input_ids(input_ids, target.config.vocab_size)
    model = target.model
    own_config = getattr(model, "generation_config", None) or GenerationConfig.from_model_config(model.config)
    preparation = _Preparation(model.config, own_config, target.device)
    config, inputs = preparation._prepare_generation_config(generation_config, **kwargs)
    refuse_unsupported_fields(preparation, config)
    inputs = check_inputs(target, input_ids, config, inputs)

    length = input_ids.shape[1]
    unset = GenerationConfig()  # an unset `max_length` is 20 on transformers 4.57 and None later on
    is_default = {
        name: kwargs.get(name) is None
        and all(c is None or getattr(c, name) == getattr(unset, name) for c in (generation_config, own_config))
        for name in ("max_length", "min_length")
    }
    preparation._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=target.device)
    config = preparation._prepare_generated_length(
        config, is_default["max_length"], is_default["min_length"], "input_ids", length, input_ids
    )
    preparation._validate_generated_length(config, length, is_default["max_length"])
    input_ids = input_ids.to(target.device)
    processors = preparation._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=length,
        encoder_input_ids=input_ids,
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        logits_processor=logits_processor or LogitsProcessorList(),
        device=target.device,
        model_kwargs={},
    )
    criteria = preparation._get_stopping_criteria(config, stopping_criteria or StoppingCriteriaList(), tokenizer)
    return Request(input_ids, config, processors, criteria, streamer, inputs)


def check_pair(draft, target: VerifiableTarget) -> None:
    """Refuse a draft that was not made for this target, and a target that is not in inference mode."""
    for name, draft_value, target_name in (
        ("hidden_size", draft.config.hidden_size, "hidden_size"),
        ("vocab_size", draft.config.vocab_size, "vocab_size"),
        ("num_target_layers", draft.config.num_target_layers, "num_hidden_layers"),
    ):
        target_value = getattr(target.config, target_name)
        if draft_value != target_value:
            raise ValueError(
                f"The draft was made for another target: its `{name}` is {draft_value}, but `target` "
                f"({type(target.model).__name__}) has `{target_name}` {target_value}. Load its own draft."
            )
    if target.model.training:
        raise ValueError(
            "`target` is in training mode (`target.training` is True), where its output is not the one to reproduce. "
            "Call `target.eval()` first."
        )


def check_input_ids(input_ids, vocab_size: int) -> None:
    """Refuse anything but one unpadded row of token ids."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        kind = f"{input_ids.dtype} tensor" if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise ValueError(f"`input_ids` must be an int64 tensor of token ids, `[1, prompt]`, but is a {kind}.")
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(
            f"`input_ids` has shape {list(input_ids.shape)}, but one prompt of at least one token is needed, "
            "`[1, prompt]`. Batches are not supported yet: call `generate` once per prompt."
        )
    low, high = input_ids.min().item(), input_ids.max().item()
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"`input_ids` holds ids from {low} to {high}, but the target's vocabulary is 0..{vocab_size - 1}. Encode "
            "the prompt with the target's own tokenizer."
        )


def refuse_unsupported_fields(preparation: _Preparation, config: GenerationConfig) -> None:
    """ValueError, by name, for a field of `config` that the loop does not honour and that is not at its default."""
    blank = _Preparation(preparation.config, GenerationConfig(), preparation.device)
    defaults, _ = blank._prepare_generation_config(GenerationConfig())
    for name in GenerationConfig().__dict__:
        if name.startswith("_") or name in HONOURED_FIELDS | INERT_FIELDS:
            continue
        if (getattr(config, name) or None) != (getattr(defaults, name) or None):  # unset is False here and None there
            raise ValueError(
                f"`{name}` is {getattr(config, name)!r}, which speculative decoding with a DSpark draft does not "
                f"support. Leave it at its default ({getattr(defaults, name)!r}), or call the target's own `generate`."
            )


def check_inputs(
    target: VerifiableTarget, input_ids: torch.Tensor, config: GenerationConfig, inputs: dict
) -> dict[str, torch.Tensor]:
    """The arguments that go to the target's forward at prefill; refuses padding and arguments that nothing would
    read."""
    inputs = {name: value for name, value in inputs.items() if value is not None}
    mask = inputs.pop("attention_mask", None)
    if mask is not None and (mask.shape != input_ids.shape or not bool((mask != 0).all())):
        raise ValueError(
            f"`attention_mask` {list(mask.shape)} is not all ones over `input_ids` {list(input_ids.shape)}, but "
            "padding is not supported. Pass the prompt unpadded, with a mask of ones of the same shape or none."
        )
    for name in inputs:
        if name not in PROMPT_INPUTS:
            raise ValueError(
                f"`{name}` is not an argument of `generate` here: it is neither a field of GenerationConfig nor one of "
                f"attention_mask, {', '.join(PROMPT_INPUTS)}. Remove it, or check its spelling."
            )
        if name not in inspect.signature(target.model.forward).parameters:
            raise ValueError(
                f"`{name}` is given, but the target ({type(target.model).__name__}) takes no such argument. Remove it."
            )
    if inputs and config.prefill_chunk_size:
        raise ValueError(
            f"`prefill_chunk_size` is {config.prefill_chunk_size}, but a prompt with {', '.join(inputs)} is prefilled "
            "in one piece. Remove `prefill_chunk_size`."
        )
    return {name: value.to(target.device) for name, value in inputs.items()}
