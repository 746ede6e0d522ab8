"""The target's state between two verify forwards: what it holds, and how rejected tokens are taken out of it again.

A verify forward folds all of its W tokens into the target's cache, and only then is it known how many of them stay.
Attention keys and values roll back by cutting. A recurrent state cannot be cut: it is a running sum. So the state from
before the forward is kept, the small inputs of the recurrence are caught while the forward runs, and after acceptance
the recurrence alone is run again over the tokens that stay. No projection, no expert, no attention is computed twice.

Three questions, one class each: where a cache keeps its tensors (`ListStore`, `LayerStore`), how a layer's recurrence
is replayed (`ReleasedDeltaReplay`, `NativeDeltaReplay`, `LayerReplay`), and the whole target's state (`TargetState`).

The rows of a batch keep different numbers of tokens, but keys and values can only be cut for all of them at once. Of
the slots that stay, a row leaves some unused; `Slots` knows which, and the attention mask hides them.

Shapes: B batch, W verify width, N tokens kept by the row that keeps most, S key/value slots, R layers replayed
together, H heads, K key and V value channels of a head, D = H * K, L conv window.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache

# Cache layers of transformers whose keys and values grow by concatenation and can be cut at any length.
CUTTABLE_LAYERS = ("DynamicLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer")

# How far a replayed state may lie from the model's own, relative to its largest entry: rounding, not another formula.
REPLAY_TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-3}
LOW_PRECISION_TOLERANCE = 5e-2

LAYERS_AT_ONCE = 8  # replayed in one go: few enough that the copies of their states stay small beside the whole state


@dataclass
class RecurrentState:
    """One layer's recurrent state: `conv` windows `[B, channels, L]` and `recurrent` matrices, as tuples of tensors."""

    conv: tuple[torch.Tensor, ...]
    recurrent: tuple[torch.Tensor, ...]

    def clone(self) -> "RecurrentState":
        return RecurrentState(tuple(t.clone() for t in self.conv), tuple(t.clone() for t in self.recurrent))


class Slots:
    """Which key/value slots of each row hold a position: all but those of padding and of rejected tokens.

    Attributes:
        mask: `[B, S]` int64, 1 where a slot holds a position; the next forward's attention mask begins with it.
        lengths: how many positions each row holds.
    """

    def __init__(self, batch_size: int, device: torch.device):
        self.mask = torch.ones(batch_size, 0, dtype=torch.long, device=device)
        self.lengths = [0] * batch_size

    @property
    def count(self) -> int:
        return self.mask.shape[1]

    @property
    def are_full(self) -> bool:
        """Whether every slot of every row holds a position, so that slot and position are one."""
        return all(length == self.count for length in self.lengths)

    def append(self, mask: torch.Tensor, lengths: list[int]) -> None:
        """Take up the slots of a forward, of which row i holds `lengths[i]`: `mask` `[B, S + W]` is the mask it got."""
        self.mask = mask
        self.lengths = [held + new for held, new in zip(self.lengths, lengths, strict=True)]

    def keep(self, kept: list[int], width: int) -> None:
        """Of the last `width` slots, held by all rows, keep the first `kept[i]` in row i, and cut what no row keeps."""
        start = self.count - width
        self.mask = self.mask[:, : start + max(kept)]
        if len(set(kept)) > 1:
            self.mask = self.mask.clone()
            self.mask[:, start:] = ~_beyond(kept, self.mask.device)
        self.lengths = [length - width + keep for length, keep in zip(self.lengths, kept, strict=True)]

    def close_gaps(self) -> torch.Tensor | None:
        """If a quarter of the slots or more could be done without: the slots `[B, longest row]` to take, in order and
        behind padding, after which they are the only ones. Else None."""
        longest = max(self.lengths)
        if 4 * (self.count - longest) < self.count:
            return None
        taken = self.mask.argsort(dim=1, stable=True)[:, self.count - longest :]
        self.mask = self.mask.gather(1, taken)
        return taken


class ListStore:
    """A cache that keeps lists over layers (`KimiDynamicCache` as released): tensors are replaced by assignment."""

    FIELDS = ("conv_states", "recurrent_states", "key_cache", "value_cache")

    def __init__(self, cache):
        self.cache = cache
        self.attention_layers = [i for i, keys in enumerate(cache.key_cache) if _is_filled(keys)]
        self.recurrent_layers = [i for i, state in enumerate(cache.recurrent_states) if _is_filled(state)]

    def attention_tensors(self) -> list[torch.Tensor]:
        cache = self.cache
        return [lists[i] for i in self.attention_layers for lists in (cache.key_cache, cache.value_cache)]

    def attention_lengths(self) -> list[int]:
        return [self.cache.key_cache[i].shape[-2] for i in self.attention_layers]

    def cut(self, length: int) -> None:
        for i in self.attention_layers:
            self.cache.key_cache[i] = self.cache.key_cache[i][..., :length, :]
            self.cache.value_cache[i] = self.cache.value_cache[i][..., :length, :]

    def move(self, slots: torch.Tensor) -> None:
        for i in self.attention_layers:
            self.cache.key_cache[i] = _take_slots(self.cache.key_cache[i], slots)
            self.cache.value_cache[i] = _take_slots(self.cache.value_cache[i], slots)

    def read(self, index: int) -> RecurrentState:
        conv = self.cache.conv_states[index]
        windows = (conv,) if isinstance(conv, torch.Tensor) else tuple(conv)
        return RecurrentState(windows, (self.cache.recurrent_states[index],))

    def write(self, index: int, state: RecurrentState) -> None:
        single = isinstance(self.cache.conv_states[index], torch.Tensor)
        self.cache.conv_states[index] = state.conv[0] if single else state.conv
        self.cache.recurrent_states[index] = state.recurrent[0]


class LayerStore:
    """A `DynamicCache` of transformers: one object a layer; recurrent tensors keep their address and are written in
    place."""

    def __init__(self, cache):
        self.cache = cache
        self.layers = cache.layers
        for i, layer in enumerate(self.layers):
            if type(layer).__name__ not in CUTTABLE_LAYERS:
                raise ValueError(
                    f"Layer {i} of the target caches its states in a `{type(layer).__name__}`, from which rejected "
                    f"tokens cannot be taken out again. Supported are {', '.join(CUTTABLE_LAYERS)}: full attention and "
                    "recurrent layers, without sliding windows, quantised or static caches."
                )
        self.attention_layers = [i for i, layer in enumerate(self.layers) if _is_filled(getattr(layer, "keys", None))]
        self.recurrent_layers = [i for i, layer in enumerate(self.layers) if hasattr(layer, "recurrent_states")]

    def attention_tensors(self) -> list[torch.Tensor]:
        return [tensor for i in self.attention_layers for tensor in (self.layers[i].keys, self.layers[i].values)]

    def attention_lengths(self) -> list[int]:
        return [self.layers[i].keys.shape[-2] for i in self.attention_layers]

    def cut(self, length: int) -> None:
        # `crop` means a target length on transformers 4.57 and a count to remove later on; cutting the tensors means
        # one thing.
        for i in self.attention_layers:
            self.layers[i].keys = self.layers[i].keys[..., :length, :]
            self.layers[i].values = self.layers[i].values[..., :length, :]

    def move(self, slots: torch.Tensor) -> None:
        for i in self.attention_layers:
            self.layers[i].keys = _take_slots(self.layers[i].keys, slots)
            self.layers[i].values = _take_slots(self.layers[i].values, slots)

    def read(self, index: int) -> RecurrentState:
        layer = self.layers[index]
        conv = (state for state in layer.conv_states.values() if state is not None)
        recurrent = (state for state in layer.recurrent_states.values() if state is not None)
        return RecurrentState(tuple(conv), tuple(recurrent))

    def write(self, index: int, state: RecurrentState) -> None:
        held = self.read(index)
        for old, new in zip(held.conv + held.recurrent, state.conv + state.recurrent):
            old.copy_(new)


def open_store(cache) -> ListStore | LayerStore:
    """The store of a cache that a target returned from its first forward; ValueError for a kind that is not
    understood."""
    if all(isinstance(getattr(cache, name, None), list) for name in ListStore.FIELDS):
        return ListStore(cache)
    if type(cache) is DynamicCache:  # a subclass may keep states of its own beside the layers
        return LayerStore(cache)
    raise ValueError(
        f"The target returned a cache of type `{type(cache).__name__}`, whose tensors this package cannot find. "
        f"Expected a `DynamicCache` or a cache with the lists {', '.join(ListStore.FIELDS)}, as Kimi "
        "K3's own."
    )


def delta_rule_state(
    state: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    kept: list[int],
) -> torch.Tensor:
    """The KDA recurrence without its outputs (Kimi Linear, arXiv 2510.26692, equation 1), token by token.

        S <- diag(exp g_t) S;   S <- S + beta_t k_t (v_t - S^T k_t)^T

    Args: state `[B, H, K, V]`, key `[B, N, H, K]` before its L2 norm, value `[B, N, H, V]`, log_decay `[B, N, H, K]`,
    beta `[B, N, H]`. Returns the state after the first `kept[i]` tokens of row i, `[B, H, K, V]` float32.
    """
    batch, heads = state.shape[:2]
    if min(kept) < key.shape[1]:  # a step with beta = 0 and no decay leaves the state as it is
        beyond = _beyond(kept, key.device)[..., None]
        beta, log_decay = beta.masked_fill(beyond, 0.0), log_decay.masked_fill(beyond[..., None], 0.0)
    key, value, decay, beta = (  # [B * H, N, *]
        t.float().transpose(1, 2).flatten(0, 1) for t in (key, value, log_decay.float().exp(), beta.unsqueeze(-1))
    )
    key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
    write = beta * key
    state = state.float().flatten(0, 1)
    columns = (decay.unsqueeze(3), write.unsqueeze(3))  # [B * H, N, K, 1]
    rows = (key.unsqueeze(2), value.unsqueeze(2))  # [B * H, N, 1, *]
    for d, w, k, v in zip(*(t.unbind(1) for t in columns + rows)):
        state = state * d
        state.addcmul_(w, torch.baddbmm(v, k, state, alpha=-1))
    return state.unflatten(0, (batch, heads))


class Replay(ABC):
    """How one recurrent layer's state is put back: what to catch of a verify forward, and what to run again."""

    def __init__(self, name: str):
        self.name = name

    @abstractmethod
    def attach(self, add_hook: Callable) -> None:
        """Hook what `replay` needs to catch: `add_hook(module, hook)`, with the arguments of a forward hook with
        kwargs."""

    def snapshot(self, state: RecurrentState) -> RecurrentState:
        """A copy of the layer's state that no forward will write to."""
        return state.clone()

    @property
    @abstractmethod
    def family(self) -> tuple:
        """Layers of one family whose states agree in shape, dtype and device can be replayed together."""

    @staticmethod
    @abstractmethod
    def replay(replays: list[Any], before: list[RecurrentState], kept: list[int]) -> list[RecurrentState]:
        """For layers of one family, the states after the first `kept[i]` tokens of row i of the caught forward, from
        the states `before` it."""

    @classmethod
    def compare(
        cls, replays: list[Any], before: list[RecurrentState], own: list[RecurrentState], whole: list[int]
    ) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """For each layer, pairs of tensors that agree if a replay of the whole forward does what the target did:
        replayed, `own`. `whole` is its width, for each row."""
        return [_pair_up(mine, theirs) for mine, theirs in zip(cls.replay(replays, before, whole), own)]


class DeltaReplay(Replay):
    """A KDA layer. Many are replayed together: the work is small, and what costs is each operation."""

    def __init__(self, mixer: nn.Module, name: str):
        super().__init__(name)
        self.mixer = mixer
        self.caught: dict[str, torch.Tensor] = {}

    @property
    def family(self) -> tuple:
        return (type(self),)

    def _catch(self, name: str):
        def hook(module, args, kwargs, output):
            self.caught[name] = output

        return hook


class ReleasedDeltaReplay(DeltaReplay):
    """KDA of the released remote code: three short convolutions, a state stored transposed `[B, H, V, K]`."""

    CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
    NEEDED = (*CONVOLUTIONS, "f_b_proj", "b_proj", "A_log", "dt_bias")

    def __init__(self, mixer: nn.Module, name: str, lower_bound: float | None):
        super().__init__(mixer, name)
        self.lower_bound = lower_bound

    def attach(self, add_hook: Callable) -> None:
        for name in self.CONVOLUTIONS:
            add_hook(getattr(self.mixer, name), self._catch_convolution(name))
        add_hook(self.mixer.f_b_proj, self._catch_gate)
        add_hook(self.mixer.b_proj, self._catch("b_proj"))

    def snapshot(self, state: RecurrentState) -> RecurrentState:
        # The released class replaces its recurrent state on every forward, so the old tensor survives by itself;
        # windows are small and may be written in place.
        return RecurrentState(tuple(window.clone() for window in state.conv), state.recurrent)

    @property
    def family(self) -> tuple:
        return (type(self), self.lower_bound)

    @staticmethod
    def replay(
        replays: list["ReleasedDeltaReplay"], before: list[RecurrentState], kept: list[int]
    ) -> list[RecurrentState]:
        def gather(name):  # [R * B, N, H, *]
            rows = torch.cat([replay.caught[name] for replay in replays])[:, : max(kept)]
            return rows.unflatten(-1, (replays[0].caught["b_proj"].shape[-1], -1))

        state = delta_rule_state(
            torch.cat([state.recurrent[0] for state in before]).transpose(-1, -2),
            gather("k_conv1d output"),
            gather("v_conv1d output"),
            ReleasedDeltaReplay._log_decay(replays, gather("f_b_proj")),
            gather("b_proj").squeeze(-1).float().sigmoid(),
            kept * len(replays),
        )
        raw = [replay.caught[f"{name} input"] for replay in replays for name in ReleasedDeltaReplay.CONVOLUTIONS]
        windows = _slide_windows([window for state in before for window in state.conv], raw, kept)
        states = state.transpose(-1, -2).contiguous().chunk(len(replays))
        return [RecurrentState(windows[3 * i : 3 * i + 3], (state,)) for i, state in enumerate(states)]

    @staticmethod
    def _log_decay(replays: list["ReleasedDeltaReplay"], raw: torch.Tensor) -> torch.Tensor:
        """From the gates' projections `[R * B, N, H, K]` to log decays of the same shape, float32."""
        rate, bias = (
            torch.stack([replay.caught[name].flatten() for replay in replays]).float().view(-1, 1, 1, raw.shape[2], n)
            for name, n in (("A_log", 1), ("dt_bias", raw.shape[3]))
        )
        rate, raw = rate.exp(), raw.float().unflatten(0, (len(replays), -1)) + bias
        bound = replays[0].lower_bound
        decay = -rate * F.softplus(raw) if bound is None else bound * torch.sigmoid(rate * raw)
        return decay.flatten(0, 1)

    def _catch_convolution(self, name: str):
        def hook(module, args, kwargs, output):
            self.caught[f"{name} input"] = args[0] if args else kwargs["x"]
            self.caught[f"{name} output"] = output[0] if isinstance(output, tuple) else output

        return hook

    def _catch_gate(self, module, args, kwargs, output):
        # The parameters are fetched here and not at replay: inside the layer's forward they are in place even when
        # offloaded.
        self.caught["f_b_proj"] = output
        self.caught["dt_bias"], self.caught["A_log"] = self.mixer.dt_bias.detach(), self.mixer.A_log.detach()


class NativeDeltaReplay(DeltaReplay):
    """KDA of transformers' own Kimi Linear: one convolution over q, k and v side by side, a state `[B, H, K, V]`."""

    INPUTS = ("q_proj", "k_proj", "v_proj")
    NEEDED = (*INPUTS, "forget_gate", "b_proj", "conv1d")

    def attach(self, add_hook: Callable) -> None:
        for name in (*self.INPUTS, "b_proj"):
            add_hook(getattr(self.mixer, name), self._catch(name))
        add_hook(self.mixer.forget_gate, self._catch_gate)

    @staticmethod
    def replay(
        replays: list["NativeDeltaReplay"], before: list[RecurrentState], kept: list[int]
    ) -> list[RecurrentState]:
        def gather(name):  # [R * B, N, *]
            return torch.cat([replay.caught[name] for replay in replays])[:, : max(kept)]

        raw = [torch.cat([replay.caught[name] for name in NativeDeltaReplay.INPUTS], dim=-1) for replay in replays]
        windows = [state.conv[0] for state in before]
        key, value = NativeDeltaReplay._convolve(replays, windows, raw, max(kept))
        beta = torch.sigmoid(gather("b_proj"))
        heads = (beta.shape[-1], -1)
        state = delta_rule_state(
            torch.cat([state.recurrent[0] for state in before]),
            key.unflatten(-1, heads),
            value.unflatten(-1, heads),
            gather("forget_gate"),
            beta,
            kept * len(replays),
        )
        slid = _slide_windows(windows, raw, kept)
        return [RecurrentState((window,), (state,)) for window, state in zip(slid, state.chunk(len(replays)))]

    @staticmethod
    def _convolve(
        replays: list["NativeDeltaReplay"], windows: list[torch.Tensor], raw: list[torch.Tensor], kept: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first `kept` tokens, `[R * B, N, D]` each, with all layers' channels side by side."""
        weight = torch.cat([replay.caught["conv1d weight"] for replay in replays]).to(raw[0].device)
        inputs = torch.cat(raw, dim=-1)[:, :kept].transpose(1, 2)
        seen = torch.cat([torch.cat(windows, dim=1), inputs], dim=-1)[..., -(kept + weight.shape[-1] - 1) :]
        mixed = F.silu(F.conv1d(seen.to(weight.dtype), weight, groups=weight.shape[0])).to(inputs.dtype)
        layers = mixed.chunk(len(replays), dim=1)
        _, key, value = torch.cat(layers).transpose(1, 2).chunk(3, dim=-1)
        return key, value

    def _catch_gate(self, module, args, kwargs, output):
        self.caught["forget_gate"] = output
        # Inside the layer's forward, where an offloaded weight is in place.
        self.caught["conv1d weight"] = self.mixer.conv1d.weight.detach()


class LayerReplay(Replay):
    """A recurrent layer of unknown structure: its own forward is run again, one kept token at a time.

    The layer is the child of the decoder layer that is handed the cache. One token at a time is the path that every
    model's plain decoding takes, so this also tells whether the wide forward treats the state as plain decoding does.
    """

    def __init__(self, decoder_layer: nn.Module, name: str, store, index: int):
        super().__init__(name)
        self.decoder_layer = decoder_layer
        self.store = store
        self.index = index
        self.call: Any = None  # the layer, its arguments and its output in the verify forward

    def attach(self, add_hook: Callable) -> None:
        for child in self.decoder_layer.children():
            add_hook(child, self._catch)

    @property
    def family(self) -> tuple:
        return (type(self), self.index)

    @staticmethod
    def replay(replays: list["LayerReplay"], before: list[RecurrentState], kept: list[int]) -> list[RecurrentState]:
        for replay, state in zip(replays, before):
            replay._step_through(state, kept)
        return [replay.store.read(replay.index) for replay in replays]

    @classmethod
    def compare(
        cls, replays: list["LayerReplay"], before: list[RecurrentState], own: list[RecurrentState], whole: list[int]
    ) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        # A wide forward that forgets what came before need not show in the state, so the outputs are compared too.
        pairs = []
        for replay, state, theirs in zip(replays, before, own):
            outputs = replay._step_through(state, whole)
            mine = replay.store.read(replay.index)
            pairs.append([(outputs, _hidden_states(replay.call[3])), *_pair_up(mine, theirs)])
        return pairs

    def _step_through(self, before: RecurrentState, kept: list[int]) -> torch.Tensor:
        if self.call is None:
            raise ValueError(
                f"The recurrent state of the target's `{self.name}` cannot be rolled back: none of its children "
                f"({', '.join(name for name, _ in self.decoder_layer.named_children())}) is handed the cache, so there "
                "is no layer whose forward could be run again. This target is not supported."
            )
        module, args, kwargs, output = self.call
        width = _hidden_states(output).shape[1]
        self.store.write(self.index, before.clone())  # a step may write in place
        outputs = []
        for token in range(max(kept)):
            step_args = tuple(_take_token(value, token, width) for value in args)
            step_kwargs = {name: _take_token(value, token, width) for name, value in kwargs.items()}
            held = self.store.read(self.index).clone() if min(kept) <= token else None
            outputs.append(_hidden_states(module(*step_args, **step_kwargs)))
            if held is not None:  # rows that keep no more tokens stay as they were
                self.store.write(self.index, _take_rows(kept, token, self.store.read(self.index), held))
        return torch.cat(outputs, dim=1)

    def _catch(self, module, args, kwargs, output):
        if any(value is self.store.cache for value in (*args, *kwargs.values())):
            self.call = (module, args, kwargs, output)


class TargetState:
    """Everything the target remembers, across one verify forward.

    Args: cache, as the target returned it from prefill; layers, the decoder layers of the text backbone; config, the
    text config. Raises ValueError, naming cache or module, for a state that cannot be rolled back.
    """

    def __init__(self, cache, layers: nn.ModuleList, config):
        self.store = open_store(cache)
        self.replays = {i: find_replay(layers[i], i, self.store, config) for i in self.store.recurrent_layers}
        self.groups = self._find_groups()
        self.before: dict[int, RecurrentState] = {}
        self._hooks, self._hooked, self._recording = ExitStack(), False, False

    @property
    def has_unknown_layers(self) -> bool:
        return any(isinstance(replay, LayerReplay) for replay in self.replays.values())

    @contextmanager
    def recording(self):
        """Around a verify forward: keep every recurrent state as it is before, and catch what the recurrences are fed.

        Hooks are added at the first forward and stay until `close`: to add and remove them takes longer than to do
        without them in between.
        """
        self.before = {index: replay.snapshot(self.store.read(index)) for index, replay in self.replays.items()}
        if not self._hooked:
            self._hooked = True
            for replay in self.replays.values():
                replay.attach(self._add_hook)
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def tensors(self) -> list[torch.Tensor]:
        """Everything that is held between forwards."""
        states = [self.store.read(index) for index in self.store.recurrent_layers]
        return [tensor for state in states for tensor in state.conv + state.recurrent] + self.store.attention_tensors()

    def close(self) -> None:
        """Take all hooks off."""
        self._hooks.close()
        self._hooked = False

    def _add_hook(self, module: nn.Module, hook: Callable) -> None:
        owner = threading.get_ident()

        def while_recording(*arguments):  # others may run the model between our forwards, and in their threads
            return hook(*arguments) if self._recording and threading.get_ident() == owner else None

        self._hooks.callback(module.register_forward_hook(while_recording, with_kwargs=True).remove)

    def roll_back(self, slots: int, kept: list[int], width: int) -> None:
        """Leave the state as if the verify forward had been `kept[i]` wide in row i instead of `width`; of the keys and
        values, the first `slots`."""
        if min(kept) < width:
            self.store.cut(slots)
            for group in self.groups:
                replays, before = [self.replays[i] for i in group], [self.before[i] for i in group]
                for index, state in zip(group, replays[0].replay(replays, before, kept)):
                    self.store.write(index, state)
        self.before = {}

    def check_replay(self, width: int) -> None:
        """Compare a replay of all `width` tokens with the state that the target itself arrived at.

        Raises ValueError, naming the layer, if they differ: then this package does not know the layer's recurrence, and
        going on would give wrong tokens.
        """
        for group in self.groups:
            replays, before = [self.replays[i] for i in group], [self.before[i] for i in group]
            own = [self.store.read(i).clone() for i in group]
            whole = [width] * own[0].recurrent[0].shape[0]
            for replay, state, pairs in zip(replays, own, replays[0].compare(replays, before, own, whole)):
                tensors = state.conv + state.recurrent
                tolerance = max(REPLAY_TOLERANCE.get(t.dtype, LOW_PRECISION_TOLERANCE) for t in tensors)
                for mine, theirs in pairs:
                    if not _agree(mine, theirs, tolerance):
                        raise ValueError(_disagreement(replay, mine, theirs, width))
            for index, state in zip(group, own):
                self.store.write(index, state)

    def _find_groups(self) -> list[list[int]]:
        """The recurrent layers, in groups of up to LAYERS_AT_ONCE that can be replayed together."""
        alike: dict[tuple, list[int]] = {}
        for index, replay in self.replays.items():
            state = self.store.read(index)
            tensors = tuple((t.shape, t.dtype, t.device) for t in state.conv + state.recurrent)
            alike.setdefault((replay.family, tensors), []).append(index)
        return [
            same[start : start + LAYERS_AT_ONCE]
            for same in alike.values()
            for start in range(0, len(same), LAYERS_AT_ONCE)
        ]


def find_replay(decoder_layer: nn.Module, index: int, store, config):
    """The way to replay one recurrent decoder layer, found by its parts and not by its class name."""
    for child, mixer in decoder_layer.named_children():
        name = f"layers.{index}.{child}"
        if all(hasattr(mixer, part) for part in ReleasedDeltaReplay.NEEDED):
            return ReleasedDeltaReplay(mixer, name, _gate_lower_bound(mixer, config))
        if all(hasattr(mixer, part) for part in NativeDeltaReplay.NEEDED):
            return NativeDeltaReplay(mixer, name)
    if index in store.attention_layers:
        raise ValueError(
            f"The target's `layers.{index}` ({type(decoder_layer).__name__}) keeps a recurrent state of unknown "
            "structure beside keys and values: running it again would append keys twice. This target is not supported."
        )
    return LayerReplay(decoder_layer, f"layers.{index}", store, index)


def _gate_lower_bound(mixer: nn.Module, config) -> float | None:
    """K3's bound of the log decay, or None for the unbounded gate; `check_replay` would find a wrong one."""
    linear = getattr(config, "linear_attn_config", None) or {}
    holders = (getattr(mixer, "gate_lower_bound", None), linear.get("gate_lower_bound"))
    return next((bound for bound in (*holders, getattr(config, "gate_lower_bound", None)) if bound is not None), None)


def _slide_windows(windows: list[torch.Tensor], raw: list[torch.Tensor], kept: list[int]) -> tuple[torch.Tensor, ...]:
    """For each layer, in row i, the last L columns of its window `[B, D, L]` followed by the first `kept[i]` rows of
    raw `[B, W, D]`."""
    held, new = torch.cat(windows, dim=1), torch.cat(raw, dim=-1)[:, : max(kept)].transpose(1, 2)
    seen, size = torch.cat([held, new.to(held.dtype)], dim=-1), held.shape[-1]
    if min(kept) == max(kept):
        slid = seen[..., -size:].contiguous()
    else:
        columns = torch.tensor(kept, device=seen.device)[:, None] + torch.arange(size, device=seen.device)
        slid = seen.gather(-1, columns[:, None].expand(-1, seen.shape[1], -1))
    return slid.split([window.shape[1] for window in windows], dim=1)


def _beyond(kept: list[int], device: torch.device) -> torch.Tensor:
    """`[B, N]` bool: true for the tokens of row i behind its first `kept[i]`."""
    return torch.arange(max(kept), device=device) >= torch.tensor(kept, device=device)[:, None]


def _take_rows(kept: list[int], token: int, new: RecurrentState, held: RecurrentState) -> RecurrentState:
    """`new` for the rows that keep `token`, `held` for the others."""
    keeps = torch.tensor([count > token for count in kept], device=new.recurrent[0].device)

    def choose(mine: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return torch.where(keeps.view(-1, *[1] * (mine.dim() - 1)), mine, old)

    return RecurrentState(tuple(map(choose, new.conv, held.conv)), tuple(map(choose, new.recurrent, held.recurrent)))


def _take_slots(tensor: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Of `[B, H, S, *]` the slots `[B, n]`, each row its own; layers of a spread target may be on other devices."""
    return tensor.gather(2, slots.to(tensor.device)[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3]))


def _take_token(value, token: int, width: int):
    """One token's share of a forward argument: axis 1 of `[B, W, …]`, the only axis of `[W]`, an attention mask
    dropped."""
    if isinstance(value, tuple):
        return tuple(_take_token(part, token, width) for part in value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 1 and value.shape[0] == width:
        return value[token : token + 1]
    if value.dim() > 1 and value.shape[1] == width:
        return value[:, token : token + 1]
    return None  # a mask over past and block: no position of a single unpadded row is masked


def _pair_up(mine: RecurrentState, theirs: RecurrentState) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(mine.conv + mine.recurrent, theirs.conv + theirs.recurrent, strict=True))


def _hidden_states(output) -> torch.Tensor:
    """The hidden states `[B, W, H]` among a layer's outputs: the first."""
    return output[0] if isinstance(output, tuple) else output


def _disagreement(replay: Replay, mine: torch.Tensor, theirs: torch.Tensor, width: int) -> str:
    return (
        f"The recurrent state of the target's `{replay.name}` cannot be rolled back: replaying {width} tokens "
        f"({type(replay).__name__}) ends up to {(mine - theirs).abs().max().item():.3g} away from the state the target "
        "itself arrived at. Either the layer's recurrence is not the one this package knows, or its multi-token "
        "forward ignores the cached state. This target is not supported on this version of transformers."
    )


def _agree(mine: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    difference = (mine.float() - theirs.float()).abs().max()
    return bool(difference <= tolerance * theirs.float().abs().max() + 1e-6)


def _is_filled(state) -> bool:
    return isinstance(state, torch.Tensor) and state.numel() > 0
