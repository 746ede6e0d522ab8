"""The target side of speculative decoding: any Kimi K3 model, or plain decoder, as something to verify against.

`VerifiableTarget` finds the text backbone, the input embedding and the output head of a loaded model, taps the hidden
states the draft feeds on, runs prefill and the W-wide verify forwards, and takes rejected tokens out of the target's
state again. Its hooks do nothing between our forwards and are gone once it is left, also by an exception: the model is
as it was.

Where models and versions of transformers differ in how a forward is called, the difference is in this file: the name of
the cache argument, the field the cache comes back in, and which module of a wrapper is the text backbone.

Taps, as the draft was trained on them: the tap of layer i, 0-based, is the tensor that enters the input norm of layer
i + 1, or the final norm for the last layer. For a plain decoder this is the residual stream, `hidden_states[i + 1]`.
Kimi K3 mixes snapshots of earlier blocks into each layer's input; `output_hidden_states` does not hold that mixture.

Shapes: B batch, P prompt positions, W verify width, T taps, H hidden, V vocabulary.
"""

import inspect
import threading
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedModel

from .target_state import Slots, TargetState


@dataclass
class TargetOutput:
    """One forward: `logits` `[B, rows, V]` of its last rows, `features` `[B, positions, T * H]`."""

    logits: torch.Tensor
    features: torch.Tensor


@dataclass
class TargetTrace:
    """What distillation needs of whole texts: `features` `[B, P, T * H]` and `hidden` `[B, P, H]`, which the output
    head turns into the logits of any position."""

    features: torch.Tensor
    hidden: torch.Tensor


@dataclass
class TargetMemory:
    """What a target has processed: its own cache, how that is rolled back, and which slots hold what."""

    cache: object
    state: TargetState
    slots: Slots
    checked_width: int


class VerifiableTarget:
    """A loaded target model with what speculative decoding needs of it.

    Args:
        model: `KimiK3ForConditionalGeneration`, `KimiLinearForCausalLM` (released or native), or a decoder with a
            `DynamicCache`.
        tap_ids: 0-based ids of the layers whose taps are collected, in the order they are concatenated.

    Raises ValueError if backbone, head or a tapped norm cannot be found. `embed` and `head` work at once;
    around `prefill`, `verify` and `commit` use it as a context manager, which lets go of the target's cache at the end:
    after an exception a notebook keeps the frames alive, and with them gigabytes.
    """

    def __init__(self, model: PreTrainedModel, tap_ids: tuple[int, ...] = ()):
        self.model = model
        self.tap_ids = tuple(tap_ids)
        self.backbone, self.lm_head = locate_text_model(model)
        self.config = self.backbone.config
        self.tapped_norms = {tap_id: self._norm_after(tap_id) for tap_id in self.tap_ids}
        self.cache_argument = cache_argument(model)
        self.cache: object = None
        self.state: TargetState | None = None
        self.slots: Slots | None = None
        self._head_like: torch.Tensor | None = None  # empty, of the dtype and device the target hands to its head
        # The widest forward, up to 2, of which a replay was compared: one token and many may take different kernels.
        self._checked_width = 0

    @cached_property  # every round asks, and a model looks through its parameters each time
    def device(self) -> torch.device:
        """Where token ids go. An offloaded model reports `meta`; then it is where accelerate runs its modules."""
        if self.model.device.type != "meta":
            return self.model.device
        hooks = (getattr(module, "_hf_hook", None) for module in self.model.modules())
        devices = (getattr(hook, "execution_device", None) for hook in hooks)
        return torch.device(next((device for device in devices if device is not None), "cpu"))

    @classmethod
    def wrap(cls, target: "VerifiableTarget | PreTrainedModel") -> "VerifiableTarget":
        """`target` itself if it is wrapped already, else a `VerifiableTarget` around it."""
        return target if isinstance(target, cls) else cls(target)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's input embedding of `[B, W]` ids, `[B, W, H]`."""
        return self.backbone.embed_tokens(token_ids.to(self.device))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's output head over `[B, W, H]`, in the dtype and on the device the target uses it: `[B, W, V]`."""
        like = self._head_like
        dtype, device = (self.model.dtype, self.device) if like is None else (like.dtype, like.device)
        return self.lm_head(hidden.to(device=device, dtype=dtype))

    def __enter__(self) -> "VerifiableTarget":
        return self

    def __exit__(self, *exception) -> None:
        if self.state is not None:
            self.state.close()
        self.cache = self.state = self.slots = None

    def hand_out(self) -> "TargetMemory":
        """What the target remembers, for a later `take_up`; this object lets go of it."""
        assert self.state is not None and self.slots is not None, "there was a prefill"
        self.state.close()
        memory = TargetMemory(self.cache, self.state, self.slots, self._checked_width)
        self.cache = self.state = self.slots = None
        return memory

    def take_up(self, memory: "TargetMemory") -> None:
        """Go on from what `hand_out` gave."""
        self.cache, self.state, self.slots = memory.cache, memory.state, memory.slots
        self._checked_width = memory.checked_width

    @property
    def lengths(self) -> list[int]:
        """Positions the target's state holds, a number for each row."""
        return [] if self.slots is None else self.slots.lengths

    def prefill(self, input_ids: torch.Tensor, lengths: list[int] | None = None, **inputs) -> TargetOutput:
        """Process the next piece of the prompt, `[B, P]`, with the logits of its last row.

        Of row i the last `lengths[i]` ids are the prompt and those before them padding; None: all are the prompt.
        `inputs` (such as `pixel_values`) go to the target's forward. Positions are counted from what the target
        processed: a placeholder of an image may stand for many.

        Raises ValueError for a cache that could not be rolled back.
        """
        output = self._forward(input_ids, 1, lengths, **inputs)
        if self.state is None:
            self.state = TargetState(self.cache, self.backbone.layers, self.config)
            if self.state.has_unknown_layers and not self._checked_width:
                self._rehearse()
        if any(held != self.slots.count for held in self.state.store.attention_lengths()):
            raise ValueError(
                f"The target processed {self.slots.count} positions but its cache holds "
                f"{self.state.store.attention_lengths()} (per attention layer). A cache that drops "
                "positions, such as a sliding window, is not supported."
            )
        return output

    def verify(self, block_ids: torch.Tensor) -> TargetOutput:
        """One forward over anchor and draft tokens, `[B, W]`: logits and features of all W rows. Follow it with
        `commit`."""
        width = block_ids.shape[1]
        with self.state.recording():
            output = self._forward(block_ids, width)
        if self._checked_width < min(width, 2):
            self.state.check_replay(width)
            self._checked_width = min(width, 2)
        return output

    def extend(self, input_ids: torch.Tensor, lengths: list[int]) -> TargetOutput:
        """Process more text behind what is held, `[B, P]`, of which row i has `lengths[i]` tokens and then padding.

        Returns the logits of each row's last token, `[B, 1, V]` (of no use for a row without one), and the features of
        all P.
        """
        width = input_ids.shape[1]
        if min(lengths) == width:
            return self.prefill(input_ids)
        # Recurrent layers know of no padding behind a text: it is taken out of the state again, as rejected drafts are.
        output = self.verify(input_ids)
        self.commit(lengths, width)
        last = (torch.tensor(lengths, device=output.logits.device) - 1).clamp(min=0)
        return TargetOutput(
            output.logits.gather(1, last[:, None, None].expand(-1, 1, output.logits.shape[2])), output.features
        )

    def commit(self, kept: list[int], width: int) -> None:
        """Of the `width` positions of the last verify forward keep the first `kept[i]` in row i and undo the others."""
        self.slots.keep(kept, width)
        self.state.roll_back(self.slots.count, kept, width)
        taken = self.slots.close_gaps()
        if taken is not None:
            self.state.store.move(taken)

    @torch.no_grad()
    def observe(self, input_ids: torch.Tensor) -> TargetTrace:
        """Process whole texts `[B, P]` at once, without a cache, through the taps the loop reads.

        Pad on the right: what comes after a position changes nothing before it.
        """
        input_ids = input_ids.to(self.device)
        mask = torch.ones_like(input_ids)
        _, hidden, features = self._tapped_forward(1, input_ids=input_ids, attention_mask=mask, use_cache=False)
        return TargetTrace(features, hidden)

    def _forward(self, input_ids: torch.Tensor, rows: int, lengths: list[int] | None = None, **inputs) -> TargetOutput:
        input_ids = input_ids.to(self.device)
        batch, width = input_ids.shape
        if self.slots is None:
            self.slots = Slots(batch, self.device)
        lengths = [width] * batch if lengths is None else lengths
        is_padded = min(lengths) < width
        # The released Kimi K3 needs the mask over past and new positions spelled out in cached forwards.
        mask = _right_aligned(lengths, width, self.device) if is_padded else torch.ones_like(input_ids)
        attention_mask = torch.cat([self.slots.mask, mask], dim=1)
        arguments = {} if self.cache is None else {self.cache_argument: self.cache}
        if self._takes_positions and (is_padded or not self.slots.are_full):
            arguments["position_ids"] = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, -width:]
        output, hidden, features = self._tapped_forward(
            rows, input_ids=input_ids, attention_mask=attention_mask, use_cache=True, **arguments, **inputs
        )
        self.cache = next((output[name] for name in ("cache", "past_key_values") if name in output), None)
        if self.cache is None:
            raise ValueError(
                f"The target ({type(self.model).__name__}) returned no cache from a forward with `use_cache=True`, so "
                "it cannot go on from what it has processed. This target is not supported on this transformers version."
            )
        if hidden.shape[1] != width:  # an image's placeholder stands for many positions
            lengths = [hidden.shape[1]] * batch
            attention_mask = mask.new_ones(batch, self.slots.count + hidden.shape[1])
        self.slots.append(attention_mask, lengths)
        return TargetOutput(output.logits, features)

    @cached_property
    def _takes_positions(self) -> bool:
        """Whether rows with unused slots can be told their positions; Kimi K3, which has none, may not take them."""
        return "position_ids" in inspect.signature(self.model.forward).parameters

    def _tapped_forward(self, rows: int, **arguments) -> tuple:
        """Call the model with its hooks on: its output, with the logits of the last `rows` positions; what its head
        would have read, `[B, P, H]`; and the features `[B, P, T * H]`."""
        taps: dict[int, torch.Tensor] = {}
        head_inputs: list[torch.Tensor] = []

        def keep_needed_rows(hidden: torch.Tensor) -> torch.Tensor:
            head_inputs.append(hidden)
            self._head_like = hidden.new_empty(0)
            return hidden[:, -rows:]

        with ExitStack() as hooks:
            _hook_before(hooks, self.lm_head, keep_needed_rows)
            for tap_id, norm in self.tapped_norms.items():
                _hook_before(hooks, norm, lambda hidden, tap_id=tap_id: taps.update({tap_id: hidden}))
            output = self.model(return_dict=True, **arguments)
        if len(head_inputs) != 1 or len(taps) != len(self.tap_ids):
            raise ValueError(
                f"The target's forward called `lm_head` {len(head_inputs)} times instead of once, or not all norms "
                f"after layers {list(self.tap_ids)} as modules (seen: {sorted(taps)}), so it cannot be tapped. "
                "This target is not supported."
            )
        features = [taps[tap_id].to(self.device) for tap_id in self.tap_ids]
        return output, head_inputs[0], torch.cat(features, dim=-1) if features else head_inputs[0][..., :0]

    def _rehearse(self) -> None:
        """Replay on a scratch cache, so that a layer of unknown structure is refused before any token is made.

        Two tokens first, fewer than a convolution window: after a wider forward the window no longer tells whether the
        one before was taken up. The tokens differ, because states of a repeated token may agree by accident.
        """
        tokens = torch.arange(8, device=self.device)[None] % self.config.vocab_size
        with VerifiableTarget(self.model) as scratch:
            scratch._checked_width = 2  # no rehearsal of the rehearsal
            scratch.prefill(tokens[:, 3:])
            for width in (2, 8):
                scratch._checked_width = 0
                scratch.verify(tokens[:, :width])
                scratch.commit([width], width)
        self._checked_width = 2

    def _norm_after(self, tap_id: int) -> nn.Module:
        depth = len(self.backbone.layers)
        if not 0 <= tap_id < depth:
            raise ValueError(f"Tap id {tap_id} names no layer of the target: ids count from 0, it has {depth} layers.")
        if tap_id == depth - 1:
            return self.backbone.norm
        following = self.backbone.layers[tap_id + 1]
        if not hasattr(following, "input_layernorm"):
            raise ValueError(
                f"The target's `layers.{tap_id + 1}` ({type(following).__name__}) has no `input_layernorm`, where the "
                f"hidden states after layer {tap_id} are tapped. This target is not supported."
            )
        return following.input_layernorm


class _User:
    """Stands for one generation, as long as it runs."""


_in_use: dict[int, weakref.ref] = {}  # by the id of a model, who has it


@contextmanager
def reserved(model: nn.Module):
    """Keep `model` for one generation: hooks that two of them put on and take off at once would get in each other's
    way. RuntimeError if another one, in this thread or in another, has it."""
    user = _User()
    mine = weakref.ref(user)  # so that one who was interrupted while letting go has let go all the same
    try:
        owner = _in_use.setdefault(id(model), mine)  # one step, which no other thread comes between
        if owner is not mine and owner() is not None:
            raise RuntimeError(
                f"`target` ({type(model).__name__}) is in use by another `generate` that has not ended. Wait for it, "
                "generate for both prompts as one batch, or load the target twice."
            )
        _in_use[id(model)] = mine
        yield
    finally:
        if _in_use.get(id(model)) is mine:
            del _in_use[id(model)]


def locate_text_model(model: PreTrainedModel) -> tuple[PreTrainedModel, nn.Module]:
    """The text backbone (with `layers`, `norm`, `embed_tokens`) inside `model`, and the output head that belongs to it.

    Goes down `language_model` and `model`, as the multimodal wrapper and the text classes nest them. ValueError without
    both, and with a compiled part.
    """
    head, module = None, model
    while module is not None:
        refuse_compiled(module)
        head = head or getattr(module, "lm_head", None)
        if all(hasattr(module, name) for name in ("layers", "norm", "embed_tokens")):
            break
        module = getattr(module, "language_model", None) or getattr(module, "model", None)
    if module is None:
        raise ValueError(
            f"`target` is a {type(model).__name__}, in which no text model was found: expected a module with `layers`, "
            "`norm` and `embed_tokens` under `model` or `language_model`. Load the target with "
            "AutoModelForCausalLM.from_pretrained."
        )
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"`target` is a {type(model).__name__}, a backbone without an output head (`lm_head`), so it cannot say "
            "which token comes next. Load it with AutoModelForCausalLM.from_pretrained instead of AutoModel."
        )
    for layer in module.layers:
        refuse_compiled(layer, *layer.children())
    refuse_compiled(head)
    return module, head


def refuse_compiled(*modules: nn.Module) -> None:
    """ValueError for a module that was compiled: it may leave out the hooks that are put on it and inside it."""
    for module in modules:
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"`target` is compiled, in whole or in part ({type(module).__name__}), and compiled modules may leave "
                "out the hooks that read its hidden states. Pass it uncompiled; the draft may be compiled."
            )


def _right_aligned(lengths: list[int], width: int, device: torch.device) -> torch.Tensor:
    """`[B, width]` int64: 1 in the last `lengths[i]` places of row i."""
    starts = width - torch.tensor(lengths, device=device)
    return (torch.arange(width, device=device) >= starts[:, None]).long()


def cache_argument(model: nn.Module) -> str:
    """The name of the forward's cache argument: `cache` for models of transformers 5.19 and later, else
    `past_key_values`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _hook_before(hooks: ExitStack, module: nn.Module, see) -> None:
    """Until `hooks` closes, `see` gets the input of each forward of `module`; what it returns, if any, replaces it."""

    owner = threading.get_ident()

    def hook(module, args, kwargs):
        if threading.get_ident() != owner:  # others may run the model in their threads
            return None
        replacement = see(args[0] if args else next(iter(kwargs.values())))
        return None if replacement is None else ((replacement,), {})

    hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
