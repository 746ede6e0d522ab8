"""What a call of `generate` asks for: validated, and prepared as transformers' own `generate` prepares it.

Generation config, logits processors and stopping criteria are built by transformers; what the loop does not support is
refused by name before any token is made. Where the versions of transformers differ in this preparation, the difference
is in this file.
"""

import copy
import inspect
import math
from dataclasses import dataclass
from numbers import Integral

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationMixin,
    LogitNormalization,
    MaxLengthCriteria,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
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
# Processors that leave a token to choose after any text, also after one that the target alone could not come to.
ASKED_ABOUT_ANY_TEXT = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
# Arguments of the target's forward that a prompt may bring along: images of the multimodal Kimi K3.
PROMPT_INPUTS = ("pixel_values", "grid_thws")


@dataclass
class Stops:
    """When the text ends: at `max_length` tokens, behind a token of `end_ids`, or when one of `criteria` says so.

    The first two are transformers' own criteria, read once: asking them after every token would cost more than the loop
    itself, and have the host wait for the device each time.
    """

    max_length: float
    end_ids: frozenset[int]
    criteria: StoppingCriteriaList


@dataclass
class Request:
    """A validated call of `generate`, as the loop needs it. `inputs` go to the target's forward at prefill."""

    input_ids: torch.Tensor
    config: GenerationConfig
    processors: "ReachableText | LogitsProcessorList"
    stops: Stops
    streamer: BaseStreamer | None
    output_rounds: bool
    inputs: dict[str, torch.Tensor]


class ReachableText:
    """The processors, asked only about text that the target alone could come to.

    A block goes on behind an end of text and beyond the budget, where a constraint may have nothing left to allow. The
    rows there are cut anyway, so their scores stay as they are. Finding out has the host wait for the device at every
    row, so processors that can do without are not wrapped (`ASKED_ABOUT_ANY_TEXT`).
    """

    def __init__(self, processors: LogitsProcessorList, prompt_length: int, config: GenerationConfig):
        self.processors = processors
        self.prompt_length = prompt_length
        self.max_length = config.max_length
        self.end_ids = config._eos_token_tensor

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[B, V]` of the token after `input_ids` `[B, c]`, as a `LogitsProcessorList` gives them."""
        if input_ids.shape[1] >= self.max_length:
            return scores
        if self.end_ids is not None and bool(torch.isin(input_ids[:, self.prompt_length :], self.end_ids).any()):
            return scores
        return self.processors(input_ids, scores)


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
    output_rounds,
    kwargs,
) -> Request:
    """Validate a call of `generate` and prepare its processors and criteria, as transformers' `generate` does."""
    check_input_ids(input_ids, target.config.vocab_size)
    check_helpers(generation_config, logits_processor, stopping_criteria, prefix_allowed_tokens_fn, streamer)
    if not isinstance(output_rounds, bool):
        raise ValueError(f"`output_rounds` is {output_rounds!r}, expected True or False.")
    model = target.model
    own_config = getattr(model, "generation_config", None) or GenerationConfig.from_model_config(model.config)
    preparation = _Preparation(model.config, own_config, target.device)
    config, inputs = preparation._prepare_generation_config(generation_config, **kwargs)
    refuse_unsupported_fields(preparation, config)
    check_fields(config, target.config.vocab_size)
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
    if any(type(processor) not in ASKED_ABOUT_ANY_TEXT for processor in processors):
        processors = ReachableText(processors, length, config)
    output_rounds = output_rounds and bool(config.return_dict_in_generate)
    return Request(input_ids, config, processors, read_stops(criteria), streamer, output_rounds, inputs)


def read_stops(criteria: StoppingCriteriaList) -> Stops:
    """`criteria`, with those whose answer follows from a token's id or place taken out of the list."""
    max_length, end_ids, others = math.inf, [], StoppingCriteriaList()
    for criterion in criteria:
        # Exact types: a subclass may answer otherwise. Beyond `max_position_embeddings` the criterion has a warning.
        if type(criterion) is EosTokenCriteria:
            end_ids += criterion.eos_token_id.flatten().tolist()
        elif type(criterion) is MaxLengthCriteria and criterion.max_length <= (
            criterion.max_position_embeddings or math.inf
        ):
            max_length = min(max_length, criterion.max_length)
        else:
            others.append(criterion)
    return Stops(max_length, frozenset(end_ids), others)


def check_given(input_ids, inputs, target) -> None:
    """Refuse a call without a target, and one with no prompt or with two."""
    if target is None:
        raise ValueError(
            "`target` is not given, but the draft only proposes: pass the loaded target model, as in "
            "`draft.generate(**inputs, target=target)`."
        )
    if (input_ids is None) == (inputs is None):
        raise ValueError(
            f"{'Neither' if inputs is None else 'Both'} of `input_ids` and `inputs` given, and each is the prompt. "
            "Pass one of them."
        )


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
        raise ValueError(f"`input_ids` must be an int64 or int32 tensor of token ids, `[1, prompt]`, but is a {kind}.")
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


def check_helpers(generation_config, logits_processor, stopping_criteria, prefix_allowed_tokens_fn, streamer) -> None:
    """Refuse helpers of the wrong kind before the target runs, and not when they are first called."""
    if not isinstance(generation_config, (GenerationConfig, type(None))):
        raise ValueError(
            f"`generation_config` is a {type(generation_config).__name__}, expected a GenerationConfig. Make one of a "
            "dictionary with GenerationConfig(**fields)."
        )
    for name, helpers in (("logits_processor", logits_processor), ("stopping_criteria", stopping_criteria)):
        if helpers is not None and not (isinstance(helpers, list) and all(map(callable, helpers))):
            raise ValueError(
                f"`{name}` is a {type(helpers).__name__}, expected a list of callables such as "
                f"{'LogitsProcessorList' if name == 'logits_processor' else 'StoppingCriteriaList'}. Put it into one."
            )
    if prefix_allowed_tokens_fn is not None and not callable(prefix_allowed_tokens_fn):
        raise ValueError(
            f"`prefix_allowed_tokens_fn` is a {type(prefix_allowed_tokens_fn).__name__}, expected a function of the "
            "row's number and its text that lists the allowed ids."
        )
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise ValueError(
            f"`streamer` is a {type(streamer).__name__}, expected an object with `put` and `end`, such as "
            "transformers' TextStreamer."
        )


def check_fields(config: GenerationConfig, vocab_size: int) -> None:
    """Refuse counts that are no integers, and token ids outside the vocabulary: both would fail in the middle."""
    for name in ("max_length", "max_new_tokens", "min_length", "min_new_tokens", "prefill_chunk_size"):
        value = getattr(config, name)
        if value is not None and (
            not isinstance(value, Integral) or value < (1 if name == "prefill_chunk_size" else 0)
        ):
            raise ValueError(f"`{name}` is {value!r}, expected a positive integer. Correct it, or leave it out.")
    for name in ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
        value = getattr(config, name)
        ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"`{name}` is {value!r}, but the vocabulary is 0..{vocab_size - 1}. Correct the id.")


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
    inputs = {name: value for name, value in inputs.items() if value is not None and value is not False}
    for name in ("attention_mask", *PROMPT_INPUTS):
        if name in inputs and not isinstance(inputs[name], torch.Tensor):
            raise ValueError(f"`{name}` is a {type(inputs[name]).__name__}, expected a tensor. Convert it first.")
    mask = inputs.pop("attention_mask", None)
    if mask is not None and (mask.shape != input_ids.shape or not bool((mask != 0).all())):
        raise ValueError(
            f"`attention_mask` {list(mask.shape)} is not all ones over `input_ids` {list(input_ids.shape)}, but "
            "padding is not supported. Pass the prompt unpadded, with a mask of ones of the same shape or none."
        )
    for name in inputs:
        if name not in PROMPT_INPUTS:
            raise ValueError(
                f"`{name}` is not supported here: beside the fields of GenerationConfig, `generate` takes "
                f"attention_mask, {', '.join(PROMPT_INPUTS)} and what its docstring names. Remove it, or check its "
                "spelling. A further turn starts from the whole text."
            )
        if name not in inspect.signature(target.model.forward).parameters:
            raise ValueError(
                f"`{name}` is given, but the target ({type(target.model).__name__}) takes no such argument. Remove it."
            )
    missing = [name for name in PROMPT_INPUTS if name not in inputs]
    if inputs and missing:
        raise ValueError(f"`{', '.join(inputs)}` is given without `{', '.join(missing)}`. Pass both, or neither.")
    if inputs and config.prefill_chunk_size:
        raise ValueError(
            f"`prefill_chunk_size` is {config.prefill_chunk_size}, but a prompt with {', '.join(inputs)} is prefilled "
            "in one piece. Remove `prefill_chunk_size`."
        )
    return {name: value.to(target.device) for name, value in inputs.items()}
