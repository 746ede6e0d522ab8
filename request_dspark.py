"""What a call of `generate` asks for: validated, and prepared as transformers' own `generate` prepares it.

Generation config, logits processors and stopping criteria are built by transformers; what the loop does not support is
refused by name before any token is made. Where the versions of transformers differ in this preparation, the difference
is in this file.
"""

import copy
import inspect
import math
import sys
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerationMixin, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from .processors_dspark import RowProcessors
from .schedule_dspark import AutoWidth, FixedWidth, ThresholdWidth, make_schedule
from .target_kimi_k3 import TargetMemory, VerifiableTarget

# Fields of GenerationConfig that the loop honours; any other one that is not at its default is refused by name.
HONOURED_FIELDS = frozenset(
    """max_length max_new_tokens min_length min_new_tokens max_time stop_strings do_sample num_return_sequences
    temperature top_k top_p top_h min_p typical_p epsilon_cutoff eta_cutoff
    repetition_penalty encoder_repetition_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias
    output_scores output_logits return_dict_in_generate pad_token_id bos_token_id eos_token_id
    prefill_chunk_size""".split()
)
# Fields that mean nothing to a decoder run token by token, whatever their value.
INERT_FIELDS = frozenset({"transformers_version", "disable_compile", "decoder_start_token_id"})
# A value other than the default that asks for nothing either.
NEUTRAL_VALUES = {"guidance_scale": 1}
# Arguments of the target's forward that a prompt may bring along: images of the multimodal Kimi K3.
PROMPT_INPUTS = ("pixel_values", "grid_thws")
# Tokens of a prompt that are processed at once unless `prefill_chunk_size` says otherwise; served with SGLang, Kimi K3
# takes as many. Their features are 1.2 GB in bfloat16.
PREFILL_CHUNK_SIZE = 16384


@dataclass
class Stops:
    """When the text ends: at `max_length` tokens, behind a token of `end_ids`, or when one of `criteria` says so.

    The first two are transformers' own criteria, read once: asking them after every token would cost more than the loop
    itself, and have the host wait for the device each time.
    """

    max_length: float
    end_ids: frozenset[int]
    criteria: StoppingCriteriaList


@dataclass(repr=False)  # two models would be in it
class DSparkState:
    """What a call of `generate` leaves behind to go on from. A further call uses it up, and returns its own.

    Attributes:
        draft, target: whose states these are.
        texts: what is held of each row's text, `[1, n]`: all but the last token.
        context: the draft's.
        memory: the target's; None once another call has taken it.
    """

    draft: nn.Module
    target: nn.Module
    texts: list[torch.Tensor]
    context: Any
    memory: TargetMemory | None

    def take_memory(self) -> TargetMemory:
        """The target's memory, which changes from here on: it can be taken once."""
        memory, self.memory = self.memory, None
        assert memory is not None, "a used one was refused"
        return memory


@dataclass
class Request:
    """A validated call of `generate`, as the loop needs it.

    Attributes:
        input_ids: the prompts as they came, `[B, prompt]`, padded on the left.
        lengths: of the prompts, without padding.
        prompts: each without padding, `[1, length]`.
        max_lengths: of each row's text, without padding.
        draws_drafts: whether draft tokens are drawn from the draft's law, and not its argmax.
        schedule: chooses how many of them each round verifies.
        inputs: go to the target's forward with the first piece of the prompt.
        first_piece: the tokens of the prompt, padding included, that the first piece holds at least.
        past: holds the beginning of each prompt already, or None.
    """

    input_ids: torch.Tensor
    lengths: list[int]
    prompts: list[torch.Tensor]
    max_lengths: list[float]
    config: GenerationConfig
    processors: RowProcessors
    stops: Stops
    streamer: BaseStreamer | None
    generator: torch.Generator | None
    draws_drafts: bool
    verification: str
    schedule: FixedWidth | ThresholdWidth | AutoWidth
    output_rounds: bool
    inputs: dict[str, torch.Tensor]
    first_piece: int
    past: DSparkState | None

    @property
    def new_ids(self) -> list[torch.Tensor]:
        """Of each prompt what `past` does not hold, `[1, n]`."""
        return [prompt[:, text.shape[1] :] for prompt, text in zip(self.prompts, self.past.texts)]

    @property
    def pad_token_id(self) -> int:
        """What fills up a row that ends before others; as in transformers, an end of text will do."""
        return int(self.config._pad_token_tensor)


class _Preparation(GenerationMixin):
    """Lends transformers' own preparation of a `generate` call to any target.

    The multimodal Kimi K3 has no GenerationMixin unless an Auto class loaded it, so the target's cannot be relied on.
    """

    def __init__(self, config, generation_config: GenerationConfig, device: torch.device):
        self.config = config
        self.generation_config = copy.deepcopy(generation_config)
        self.device = device


def prepare_request(
    draft: nn.Module,
    target: VerifiableTarget,
    input_ids,
    generation_config,
    logits_processor,
    stopping_criteria,
    prefix_allowed_tokens_fn,
    streamer,
    tokenizer,
    generator,
    draft_sampling,
    verification,
    output_rounds,
    verify_width,
    confidence_threshold,
    verify_costs,
    kwargs,
) -> Request:
    """Validate a call of `generate` and prepare its processors and criteria, as transformers' `generate` does."""
    check_input_ids(input_ids, target.config.vocab_size)
    check_helpers(generation_config, logits_processor, stopping_criteria, prefix_allowed_tokens_fn, streamer, generator)
    check_choice("draft_sampling", draft_sampling, ("sample", "greedy"))
    check_choice("verification", verification, ("token", "block"))
    check_choice("output_rounds", output_rounds, (True, False))
    model = target.model
    own_config = getattr(model, "generation_config", None) or GenerationConfig.from_model_config(model.config)
    preparation = _Preparation(model.config, own_config, target.device)
    config, inputs = preparation._prepare_generation_config(generation_config, **kwargs)
    refuse_unsupported_fields(preparation, config)
    check_fields(config, target.config.vocab_size)
    config.prefill_chunk_size = config.prefill_chunk_size or PREFILL_CHUNK_SIZE
    past = pop_past(inputs)
    preparation._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=target.device)
    lengths, inputs = check_inputs(target, input_ids, preparation, config, inputs)
    config = with_lengths(preparation, config, (generation_config, own_config), kwargs, input_ids)

    copies = config.num_return_sequences or 1
    input_ids = input_ids.to(target.device).repeat_interleave(copies, dim=0)
    lengths = [length for length in lengths for _ in range(copies)]
    paddings = [input_ids.shape[1] - length for length in lengths]
    prompts = [row[None, padding:] for row, padding in zip(input_ids, paddings)]
    refuse_for_batches(len(prompts), config, streamer, inputs)
    first_piece = max(max(paddings) + 1, images_end(model, input_ids) if inputs else 0)
    check_past(past, draft, model, prompts, inputs)
    drawn = bool(config.do_sample) and draft_sampling == "sample"
    schedule = make_schedule(draft, model, verify_width, confidence_threshold, verify_costs, drawn)
    criteria = preparation._get_stopping_criteria(config, stopping_criteria or StoppingCriteriaList(), tokenizer)
    stops = read_stops(criteria)
    max_lengths = [stops.max_length - padding for padding in paddings]
    check_positions(draft, max(lengths), max(max_lengths))
    return Request(
        input_ids,
        lengths,
        prompts,
        max_lengths,
        config,
        make_row_processors(preparation, config, prompts, paddings, prefix_allowed_tokens_fn, logits_processor),
        stops,
        streamer,
        generator,
        drawn,
        verification,
        schedule,
        output_rounds and bool(config.return_dict_in_generate),
        inputs,
        first_piece,
        past,
    )


def with_lengths(
    preparation: _Preparation, config: GenerationConfig, sources: tuple, kwargs: dict, input_ids: torch.Tensor
) -> GenerationConfig:
    """`config` with `max_length` and `min_length` worked out for these prompts, as transformers does.

    `sources` are the configurations, or None, that it was made of beside `kwargs`.
    """
    unset = GenerationConfig()  # an unset `max_length` is 20 on transformers 4.57 and None later on
    is_default = {
        name: kwargs.get(name) is None
        and all(source is None or getattr(source, name) == getattr(unset, name) for source in sources)
        for name in ("max_length", "min_length")
    }
    length = input_ids.shape[1]
    config = preparation._prepare_generated_length(
        config, is_default["max_length"], is_default["min_length"], "input_ids", length, input_ids
    )
    preparation._validate_generated_length(config, length, is_default["max_length"])
    return config


def make_row_processors(
    preparation: _Preparation,
    config: GenerationConfig,
    prompts: list[torch.Tensor],
    paddings: list[int],
    prefix_allowed_tokens_fn,
    logits_processor,
) -> RowProcessors:
    """Processors of its own for each row, whose prompt is without the padding that `config` counts in."""
    copies = config.num_return_sequences or 1
    configs = [config_of_row(config, padding) for padding in paddings]
    constraints = [allow_for_row(prefix_allowed_tokens_fn, row // copies) for row in range(len(prompts))]
    processors = [
        make_processors(preparation, *row, logits_processor) for row in zip(configs, prompts, constraints, strict=True)
    ]
    return RowProcessors(processors, [prompt.shape[1] for prompt in prompts], configs)


def make_processors(
    preparation: _Preparation, config: GenerationConfig, prompt: torch.Tensor, constraint, logits_processor
) -> LogitsProcessorList:
    """The processors of one row, whose prompt is `[1, length]`."""
    return preparation._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=prompt.shape[1],
        encoder_input_ids=prompt,
        prefix_allowed_tokens_fn=constraint,
        logits_processor=LogitsProcessorList(logits_processor or []),
        device=preparation.device,
        model_kwargs={},
    )


def images_end(model: nn.Module, input_ids: torch.Tensor) -> int:
    """The tokens of a prompt `[1, P]` up to its last placeholder of an image; all of them if it is not known which they
    are."""
    placeholder = getattr(model.config, "media_placeholder_token_id", None)
    places = [place for place, token_id in enumerate(input_ids[0].tolist()) if token_id == placeholder]
    return places[-1] + 1 if places else input_ids.shape[1]


def check_positions(draft, length: int, max_length: float) -> None:
    """ValueError for a prompt of `length` positions, or a text of up to `max_length`, that the draft has no positions
    for."""
    maximum = draft.config.max_position_embeddings
    if length >= maximum:
        raise ValueError(
            f"The prompt takes {length} positions, and the draft has {maximum} (`max_position_embeddings`), which "
            "leaves none for new text. Shorten the prompt."
        )
    if max_length > maximum:
        raise ValueError(
            f"The text may grow to {max_length} positions, and the draft has {maximum} (`max_position_embeddings`), of "
            f"which the prompt takes {length}. Pass `max_new_tokens` of {maximum - length} at most."
        )


def pop_past(inputs: dict) -> DSparkState | None:
    """Take `past_key_values` or `cache` out of the arguments; ValueError for both, or for anything else than ours."""
    found = {name: inputs.pop(name) for name in ("past_key_values", "cache") if inputs.get(name) is not None}
    if len(found) > 1:
        raise ValueError("`past_key_values` and `cache` are both given, and mean the same. Pass one of them.")
    for name, past in found.items():
        if not isinstance(past, DSparkState):
            raise ValueError(
                f"`{name}` is a {type(past).__name__}, expected the `past_key_values` of an earlier output of the "
                "draft's `generate`: the draft has processed the text too. Leave it out to start from the whole text."
            )
    return next(iter(found.values()), None)


def check_past(
    past: DSparkState | None, draft: nn.Module, model: nn.Module, prompts: list[torch.Tensor], inputs: dict
) -> None:
    """ValueError for a past that is not what these models have processed of these prompts."""
    if past is None:
        return
    if inputs:
        raise ValueError(
            f"`{', '.join(inputs)}` is given with `past_key_values`; images belong to the first turn only."
        )
    if past.draft is not draft or past.target is not model:
        raise ValueError("`past_key_values` comes from another draft or target. Leave it out to start afresh.")
    if past.memory is None:
        raise ValueError(
            "`past_key_values` has been used up by another call, which changed it as it went on. Pass those of that "
            "call's output, or leave them out to start afresh."
        )
    if len(past.texts) != len(prompts):
        raise ValueError(f"`past_key_values` holds {len(past.texts)} rows, and the prompts are {len(prompts)}.")
    held = [past.memory.slots.mask, *past.context.keys, *past.context.values, *past.memory.state.tensors()]
    if not torch.is_inference_mode_enabled() and any(tensor.is_inference() for tensor in held):
        raise ValueError(
            "`past_key_values` was made under torch.inference_mode(), where alone it can be changed. Go on under "
            "torch.inference_mode() too, or leave it out to start afresh."
        )
    for row, (text, prompt) in enumerate(zip(past.texts, prompts)):
        length = text.shape[1]
        if prompt.shape[1] <= length or not torch.equal(prompt[:, :length], text):
            raise ValueError(
                f"`input_ids` row {row} ({prompt.shape[1]} tokens without padding) does not go on from the {length} "
                "tokens that `past_key_values` holds. Pass the whole text, the earlier turns token for token, or leave "
                "`past_key_values` out."
            )


def config_of_row(config: GenerationConfig, padding: int) -> GenerationConfig:
    """`config` for one row, of which the first `padding` places do not count: its lengths are that much shorter."""
    config = copy.copy(config)
    config.num_return_sequences = 1
    config.max_length -= padding
    config.min_length = max(0, (config.min_length or 0) - padding)
    return config


def allow_for_row(prefix_allowed_tokens_fn, row: int):
    """The caller's function, told the number of the row's prompt, which a processor that is handed one row cannot."""
    if prefix_allowed_tokens_fn is None:
        return None
    return lambda _, text: prefix_allowed_tokens_fn(row, text)


def refuse_for_batches(batch: int, config: GenerationConfig, streamer, inputs: dict) -> None:
    """ValueError, by name, for what works with one row only."""
    if batch == 1:
        return
    if config._pad_token_tensor is None:
        raise ValueError(
            f"`pad_token_id` is None for {batch} rows, expected a token id, which fills up rows that end before others."
        )
    if streamer is not None:
        raise ValueError(
            f"`streamer` is given for {batch} rows, expected one row: they are written at different speeds. Leave it "
            "out, or call `generate` once for each."
        )
    if inputs:
        raise ValueError(
            f"`{', '.join(inputs)}` is given for {batch} rows, expected one: call `generate` once for each prompt with "
            "images."
        )


def read_stops(criteria: StoppingCriteriaList) -> Stops:
    """`criteria`, with those whose answer follows from a token's id or place taken out of the list."""
    max_length, end_ids, others = math.inf, [], StoppingCriteriaList()
    for criterion in criteria:
        # Exact types: a subclass may answer otherwise.
        if type(criterion) is EosTokenCriteria:
            end_ids += criterion.eos_token_id.flatten().tolist()
        elif type(criterion) is MaxLengthCriteria:
            max_length = min(max_length, criterion.max_length)
            if criterion.max_length > (criterion.max_position_embeddings or math.inf):  # it has a warning to give
                others.append(MaxLengthCriteria(sys.maxsize, criterion.max_position_embeddings))
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
    """Refuse anything but rows of token ids."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        kind = f"{input_ids.dtype} tensor" if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise ValueError(
            f"`input_ids` must be an int64 or int32 tensor of token ids, `[batch, prompt]`, but is a {kind}."
        )
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(
            f"`input_ids` has shape {list(input_ids.shape)}, expected `[batch, prompt]` with at least one row and one "
            "token."
        )
    low, high = input_ids.min().item(), input_ids.max().item()
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"`input_ids` holds ids from {low} to {high}, but the target's vocabulary is 0..{vocab_size - 1}. Encode "
            "the prompt with the target's own tokenizer."
        )


def check_helpers(
    generation_config, logits_processor, stopping_criteria, prefix_allowed_tokens_fn, streamer, generator
) -> None:
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
    if not isinstance(generator, (torch.Generator, type(None))):
        raise ValueError(f"`generator` is a {type(generator).__name__}, expected a torch.Generator.")


def check_choice(name: str, value, choices: tuple) -> None:
    """Refuse a value that is none of the choices."""
    if type(value) is not type(choices[0]) or value not in choices:
        raise ValueError(f"`{name}` is {value!r}, expected {' or '.join(map(repr, choices))}.")


def check_fields(config: GenerationConfig, vocab_size: int) -> None:
    """Refuse counts that are no integers, and token ids outside the vocabulary: both would fail in the middle."""
    at_least_one = ("prefill_chunk_size", "num_return_sequences")
    for name in ("max_length", "max_new_tokens", "min_length", "min_new_tokens", *at_least_one):
        value = getattr(config, name)
        if value is not None and (not is_integer(value) or value < (name in at_least_one)):
            raise ValueError(f"`{name}` is {value!r}, expected a positive integer. Correct it, or leave it out.")
    if config.max_time is not None and not isinstance(config.max_time, Real):
        raise ValueError(f"`max_time` is {config.max_time!r}, expected a number of seconds.")
    for name in ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
        value = getattr(config, name)
        for token_id in as_list(value):
            if not is_integer(token_id) or not 0 <= token_id < vocab_size:
                raise ValueError(f"`{name}` is {value!r}, but the vocabulary is 0..{vocab_size - 1}. Correct the id.")
    if not all(map(is_integer, as_list(config.eos_token_id))):
        raise ValueError(
            f"`eos_token_id` is {config.eos_token_id!r}, expected a token id, or a list or tensor of them."
        )


def as_list(ids) -> list:
    """Token ids that may come as None, a number, a list or a tensor."""
    ids = ids.tolist() if isinstance(ids, torch.Tensor) else ids
    return [] if ids is None else list(ids) if isinstance(ids, (list, tuple)) else [ids]


def is_integer(value) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def refuse_unsupported_fields(preparation: _Preparation, config: GenerationConfig) -> None:
    """ValueError, by name, for a field of `config` that the loop does not honour and that is not at its default."""
    blank = _Preparation(preparation.config, GenerationConfig(), preparation.device)
    defaults, _ = blank._prepare_generation_config(GenerationConfig())
    for name in GenerationConfig().__dict__:
        if name.startswith("_") or name in HONOURED_FIELDS | INERT_FIELDS:
            continue
        value = getattr(config, name)
        if name in NEUTRAL_VALUES and value == NEUTRAL_VALUES[name]:
            continue
        if (value or None) != (getattr(defaults, name) or None):  # unset is False here and None there
            raise ValueError(
                f"`{name}` is {value!r}, which speculative decoding with a DSpark draft does not "
                f"support. Leave it at its default ({getattr(defaults, name)!r}), or call the target's own `generate`."
            )


def check_inputs(
    target: VerifiableTarget, input_ids: torch.Tensor, preparation: _Preparation, config: GenerationConfig, inputs: dict
) -> tuple[list[int], dict[str, torch.Tensor]]:
    """The length of each prompt without padding, and the arguments that go to the target's forward at prefill. Refuses
    arguments that nothing would read."""
    inputs = {name: value for name, value in inputs.items() if value is not None and value is not False}
    for name in ("attention_mask", *PROMPT_INPUTS):
        if name in inputs and not isinstance(inputs[name], torch.Tensor):
            raise ValueError(f"`{name}` is a {type(inputs[name]).__name__}, expected a tensor. Convert it first.")
    mask = inputs.pop("attention_mask", None)
    if mask is None:  # transformers reads it off the pad tokens
        ids = input_ids.to(target.device)
        mask = preparation._prepare_attention_mask_for_generation(ids, config, {})
    lengths = check_mask(mask, input_ids)
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
    if inputs and min(lengths) < input_ids.shape[1]:
        raise ValueError(
            f"`{', '.join(inputs)}` is given with a padded prompt (`attention_mask` hides "
            f"{input_ids.shape[1] - min(lengths)} places). Pass the prompt unpadded."
        )
    return lengths, {name: value.to(target.device) for name, value in inputs.items()}


def check_mask(mask: torch.Tensor, input_ids: torch.Tensor) -> list[int]:
    """The length of each prompt without padding; refuses a mask with anything but padding on the left."""
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"`attention_mask` has shape {list(mask.shape)}, expected that of `input_ids`, {list(input_ids.shape)}."
        )
    real = mask != 0
    if not bool(real[:, -1].all() and (real.int().diff(dim=1) >= 0).all()):
        raise ValueError(
            f"`attention_mask` {list(mask.shape)}, given or read off the pad tokens in `input_ids`, hides places that "
            "are not at the start of a row. Prompts of different lengths are padded on the left: set "
            '`tokenizer.padding_side = "left"`. Where a pad token is part of the text, pass a mask that says so.'
        )
    return real.sum(dim=1).tolist()
