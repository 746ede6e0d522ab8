"""The target's state between two verify forwards: what it holds, and how rejected tokens are taken out of it again.

A verify forward folds all of its W tokens into the target's cache, and only then is it known how many of them stay.
Attention keys and values roll back by cutting. A recurrent state cannot be cut: it is a running sum. So the state from
before the forward is kept, the small inputs of the recurrence are caught while the forward runs, and after acceptance
the recurrence alone is run again over the tokens that stay. No projection, no expert, no attention is computed twice.

Three questions, one class each: where a cache keeps its tensors (`ListStore`, `LayerStore`), how a layer's recurrence
is replayed (`ReleasedDeltaReplay`, `NativeDeltaReplay`, `LayerReplay`), and the whole target's state (`TargetState`).

Shapes: B batch, W verify width, N kept tokens, H heads, K key and V value channels of a head, D = H * K, L conv window.
"""

import threading
from abc import ABC, abstractmethod
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache

# Cache layers of transformers whose keys and values grow by concatenation and can be cut at any length.
CUTTABLE_LAYERS = ("DynamicLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer")

# How far a replayed state may lie from the model's own, relative to its largest entry: rounding, not another formula.
REPLAY_TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-3}
LOW_PRECISION_TOLERANCE = 5e-2


@dataclass
class RecurrentState:
    """One layer's recurrent state: `conv` windows `[B, channels, L]` and `recurrent` matrices, as tuples of tensors."""

    conv: tuple[torch.Tensor, ...]
    recurrent: tuple[torch.Tensor, ...]

    def clone(self) -> "RecurrentState":
        return RecurrentState(tuple(t.clone() for t in self.conv), tuple(t.clone() for t in self.recurrent))


class ListStore:
    """A cache that keeps lists over layers (`KimiDynamicCache` as released): tensors are replaced by assignment."""

    FIELDS = ("conv_states", "recurrent_states", "key_cache", "value_cache")

    def __init__(self, cache):
        self.cache = cache
        self.attention_layers = [i for i, keys in enumerate(cache.key_cache) if _is_filled(keys)]
        self.recurrent_layers = [i for i, state in enumerate(cache.recurrent_states) if _is_filled(state)]

    def attention_lengths(self) -> list[int]:
        return [self.cache.key_cache[i].shape[-2] for i in self.attention_layers]

    def cut(self, length: int) -> None:
        for i in self.attention_layers:
            self.cache.key_cache[i] = self.cache.key_cache[i][..., :length, :]
            self.cache.value_cache[i] = self.cache.value_cache[i][..., :length, :]

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

    def attention_lengths(self) -> list[int]:
        return [self.layers[i].keys.shape[-2] for i in self.attention_layers]

    def cut(self, length: int) -> None:
        # `crop` means a target length on transformers 4.57 and a count to remove later on; cutting the tensors means
        # one thing.
        for i in self.attention_layers:
            self.layers[i].keys = self.layers[i].keys[..., :length, :]
            self.layers[i].values = self.layers[i].values[..., :length, :]

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
    state: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The KDA recurrence without its outputs (Kimi Linear, arXiv 2510.26692, equation 1), token by token.

        S <- diag(exp g_t) S;   S <- S + beta_t k_t (v_t - S^T k_t)^T

    Args: state `[B, H, K, V]`, key `[B, N, H, K]` before its L2 norm, value `[B, N, H, V]`, log_decay `[B, N, H, K]`,
    beta `[B, N, H]`. Returns the state after N tokens, `[B, H, K, V]` float32.
    """
    key, value, log_decay, beta, state = (t.float() for t in (key, value, log_decay, beta, state))
    key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
    for k, v, g, b in zip(key.unbind(1), value.unbind(1), log_decay.unbind(1), beta.unbind(1)):
        state = state * g.exp().unsqueeze(-1)
        error = v - torch.einsum("bhk,bhkv->bhv", k, state)
        state = state + torch.einsum("bhk,bhv->bhkv", b.unsqueeze(-1) * k, error)
    return state


class Replay(ABC):
    """How one recurrent layer's state is put back: what to catch of a verify forward, and what to run again."""

    def __init__(self, name: str):
        self.name = name

    @abstractmethod
    def attach(self, hooks: ExitStack) -> None:
        """Add hooks that catch what `replay` needs; closing `hooks` takes them off."""

    def snapshot(self, state: RecurrentState) -> RecurrentState:
        """A copy of the layer's state that no forward will write to."""
        return state.clone()

    @abstractmethod
    def replay(self, before: RecurrentState, kept: int) -> RecurrentState:
        """The state after the first `kept` tokens of the caught forward, from the state `before` it."""

    def compare(
        self, before: RecurrentState, own: RecurrentState, width: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of tensors that agree if a replay of the whole forward does what the target did: replayed, `own`."""
        return _pair_up(self.replay(before, width), own)


class ReleasedDeltaReplay(Replay):
    """KDA of the released remote code: three short convolutions, a state stored transposed `[B, H, V, K]`."""

    NEEDED = ("q_conv1d", "k_conv1d", "v_conv1d", "f_b_proj", "b_proj", "A_log", "dt_bias")

    def __init__(self, mixer: nn.Module, name: str, lower_bound: float | None):
        super().__init__(name)
        self.mixer = mixer
        self.lower_bound = lower_bound
        self.caught: dict[str, torch.Tensor] = {}

    def attach(self, hooks: ExitStack) -> None:
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            _add_hook(hooks, getattr(self.mixer, name), self._catch_convolution(name))
        _add_hook(hooks, self.mixer.f_b_proj, self._catch_decay)
        _add_hook(hooks, self.mixer.b_proj, self._catch_beta)

    def snapshot(self, state: RecurrentState) -> RecurrentState:
        # The released class replaces its recurrent state on every forward, so the old tensor survives by itself;
        # windows are small and may be written in place.
        return RecurrentState(tuple(window.clone() for window in state.conv), state.recurrent)

    def replay(self, before: RecurrentState, kept: int) -> RecurrentState:
        caught = {name: tensor[:, :kept] for name, tensor in self.caught.items()}
        windows = tuple(
            _slide_window(window, caught[f"{name} input"].transpose(1, 2))
            for window, name in zip(before.conv, ("q_conv1d", "k_conv1d", "v_conv1d"))
        )
        heads = (caught["beta"].shape[-1], -1)
        state = delta_rule_state(
            before.recurrent[0].transpose(-1, -2),
            caught["k_conv1d output"].unflatten(-1, heads),
            caught["v_conv1d output"].unflatten(-1, heads),
            caught["decay"],
            caught["beta"],
        )
        return RecurrentState(windows, (state.transpose(-1, -2).contiguous(),))

    def _catch_convolution(self, name: str):
        def hook(module, args, kwargs, output):
            self.caught[f"{name} input"] = args[0] if args else kwargs["x"]
            self.caught[f"{name} output"] = output[0] if isinstance(output, tuple) else output

        return hook

    def _catch_decay(self, module, args, kwargs, output):
        # Computed here and not at replay: inside the layer's forward its own parameters are in place even when
        # offloaded.
        raw = (output.float() + self.mixer.dt_bias.float()).unflatten(-1, (self.mixer.A_log.numel(), -1))
        rate = self.mixer.A_log.float().exp().view(-1, 1)
        bound = self.lower_bound
        self.caught["decay"] = -rate * F.softplus(raw) if bound is None else bound * torch.sigmoid(rate * raw)

    def _catch_beta(self, module, args, kwargs, output):
        self.caught["beta"] = output.float().sigmoid()


class NativeDeltaReplay(Replay):
    """KDA of transformers' own Kimi Linear: one convolution over q, k and v side by side, a state `[B, H, K, V]`."""

    NEEDED = ("q_proj", "k_proj", "v_proj", "forget_gate", "b_proj", "conv1d")

    def __init__(self, mixer: nn.Module, name: str):
        super().__init__(name)
        self.mixer = mixer
        self.caught: dict[str, torch.Tensor] = {}

    def attach(self, hooks: ExitStack) -> None:
        for name in ("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate"):
            _add_hook(hooks, getattr(self.mixer, name), self._catch(name))

    def replay(self, before: RecurrentState, kept: int) -> RecurrentState:
        caught = {name: self.caught[name][:, :kept] for name in ("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate")}
        raw = torch.cat([caught["q_proj"], caught["k_proj"], caught["v_proj"]], dim=-1).transpose(1, 2)
        weight = self.caught["conv1d weight"].to(raw.device)
        seen = torch.cat([before.conv[0], raw], dim=-1)[..., -(kept + weight.shape[-1] - 1) :]
        mixed = F.silu(F.conv1d(seen.to(weight.dtype), weight, groups=weight.shape[0])).to(raw.dtype).transpose(1, 2)
        _, key, value = mixed.chunk(3, dim=-1)
        heads = (caught["b_proj"].shape[-1], -1)
        beta = torch.sigmoid(caught["b_proj"])
        state = delta_rule_state(
            before.recurrent[0], key.unflatten(-1, heads), value.unflatten(-1, heads), caught["forget_gate"], beta
        )
        return RecurrentState((_slide_window(before.conv[0], raw),), (state,))

    def _catch(self, name: str):
        def hook(module, args, kwargs, output):
            self.caught[name] = output
            if name == "forget_gate":  # inside the layer's forward, where an offloaded weight is in place
                self.caught["conv1d weight"] = self.mixer.conv1d.weight.detach()

        return hook


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
        self.call = None  # the layer, its arguments and its output in the verify forward

    def attach(self, hooks: ExitStack) -> None:
        for child in self.decoder_layer.children():
            _add_hook(hooks, child, self._catch)

    def replay(self, before: RecurrentState, kept: int) -> RecurrentState:
        self._step_through(before, kept)
        return self.store.read(self.index)

    def compare(
        self, before: RecurrentState, own: RecurrentState, width: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        # A wide forward that forgets what came before need not show in the state, so the outputs are compared too.
        outputs = self._step_through(before, width)
        return [(outputs, _hidden_states(self.call[3])), *_pair_up(self.store.read(self.index), own)]

    def _step_through(self, before: RecurrentState, kept: int) -> torch.Tensor:
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
        for token in range(kept):
            step_args = tuple(_take_token(value, token, width) for value in args)
            step_kwargs = {name: _take_token(value, token, width) for name, value in kwargs.items()}
            outputs.append(_hidden_states(module(*step_args, **step_kwargs)))
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
        self.before: dict[int, RecurrentState] = {}

    @property
    def has_unknown_layers(self) -> bool:
        return any(isinstance(replay, LayerReplay) for replay in self.replays.values())

    @contextmanager
    def recording(self):
        """Around a verify forward: keep every recurrent state as it is before, and catch what the recurrences are fed.

        The hooks are on for this one forward, so that nothing else that runs the model disturbs what was caught.
        """
        self.before = {index: replay.snapshot(self.store.read(index)) for index, replay in self.replays.items()}
        with ExitStack() as hooks:
            for replay in self.replays.values():
                replay.attach(hooks)
            yield

    def roll_back(self, length: int, kept: int, width: int) -> None:
        """Leave the state as if the verify forward had been `kept` wide instead of `width`, `length` positions in
        all."""
        if kept < width:
            self.store.cut(length)
            for index, replay in self.replays.items():
                self.store.write(index, replay.replay(self.before[index], kept))
        self.before = {}

    def check_replay(self, width: int) -> None:
        """Compare a replay of all `width` tokens with the state that the target itself arrived at.

        Raises ValueError, naming the layer, if they differ: then this package does not know the layer's recurrence, and
        going on would give wrong tokens.
        """
        for index, replay in self.replays.items():
            own = self.store.read(index).clone()
            tolerance = max(REPLAY_TOLERANCE.get(t.dtype, LOW_PRECISION_TOLERANCE) for t in own.conv + own.recurrent)
            for mine, theirs in replay.compare(self.before[index], own, width):
                if not _agree(mine, theirs, tolerance):
                    raise ValueError(
                        f"The recurrent state of the target's `{replay.name}` cannot be rolled back: replaying {width} "
                        f"tokens ({type(replay).__name__}) ends up to {(mine - theirs).abs().max().item():.3g} away "
                        "from the state the target itself arrived at. Either the layer's recurrence is not the one "
                        "this package knows, or its multi-token forward ignores the cached state. This target is not "
                        "supported on this version of transformers."
                    )
            self.store.write(index, own)


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


def _slide_window(window: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """The last L columns of `window` `[B, D, L]` followed by `raw` `[B, D, N]`."""
    return torch.cat([window, raw.to(window.dtype)], dim=-1)[..., -window.shape[-1] :].contiguous()


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


def _add_hook(hooks: ExitStack, module: nn.Module, hook) -> None:
    owner = threading.get_ident()

    def own_forward(*arguments):
        return hook(*arguments) if threading.get_ident() == owner else None  # others may run the model in their threads

    hooks.callback(module.register_forward_hook(own_forward, with_kwargs=True).remove)


def _agree(mine: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    difference = (mine.float() - theirs.float()).abs().max()
    return bool(difference <= tolerance * theirs.float().abs().max() + 1e-6)


def _is_filled(state) -> bool:
    return isinstance(state, torch.Tensor) and state.numel() > 0
