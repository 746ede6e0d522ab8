"""The target's state after a rollback, tensor by tensor, against a fresh prefill; replays of every kind; refusals."""

import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import HAS_NATIVE_KIMI, TARGET_KINDS, make_target, random_ids, tensors_of
from dspark import target_state
from dspark.target_kimi_k3 import VerifiableTarget, cache_argument, locate_text_model
from dspark.target_state import ReleasedDeltaReplay, TargetState, delta_rule_state, open_store
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

WIDTH = 8
RECURRENT_KINDS = [kind for kind in TARGET_KINDS if kind != "qwen3"]
KIMI_K3_KINDS = pytest.mark.parametrize("kind", ["text", "wrapper"])


pytestmark = pytest.mark.usefixtures("no_grad")


def fresh_tensors(model, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the model's own cache holds after one forward over `ids`."""
    name = cache_argument(model)
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True)
    return tensors_of(output[name] if name in output else output["past_key_values"])


def assert_same_state(cache, expected: dict[str, torch.Tensor], only: str = "", **tolerance) -> None:
    held = {name: tensor for name, tensor in tensors_of(cache).items() if only in name}
    expected = {name: tensor for name, tensor in expected.items() if only in name}
    assert held.keys() == expected.keys() and held
    for name, tensor in held.items():
        assert tensor.dtype == expected[name].dtype and tensor.shape == expected[name].shape, name
        torch.testing.assert_close(
            tensor, expected[name], **(tolerance or dict(atol=1e-4, rtol=1e-4)), msg=lambda m, name=name: f"{name}: {m}"
        )


def run_round(target: VerifiableTarget, committed: torch.Tensor, kept: int, width: int = WIDTH) -> torch.Tensor:
    block = random_ids(width)
    target.verify(block)
    target.commit([kept], width)
    return torch.cat([committed, block[:, :kept]], dim=1)


# The recurrence alone


def random_recurrence(tokens: int, seed: int = 0):
    torch.manual_seed(seed)
    batch, heads, key_dim, value_dim = 2, 3, 5, 4
    return dict(
        state=torch.randn(batch, heads, key_dim, value_dim),
        key=torch.randn(batch, tokens, heads, key_dim),
        value=torch.randn(batch, tokens, heads, value_dim),
        log_decay=-5 * torch.rand(batch, tokens, heads, key_dim),
        beta=torch.rand(batch, tokens, heads),
    )


def test_delta_rule_equals_the_formula_written_out_in_float64():
    given = random_recurrence(tokens=9)
    kept = [9, 4]
    result = delta_rule_state(**given, kept=kept)
    assert result.dtype == torch.float32 and result.shape == given["state"].shape
    wide = {name: tensor.double() for name, tensor in given.items()}
    for b in range(2):
        for h in range(3):
            state = wide["state"][b, h]
            for t in range(kept[b]):
                key = wide["key"][b, t, h]
                key = key / (key @ key + 1e-6).sqrt()
                state = torch.diag(wide["log_decay"][b, t, h].exp()) @ state
                state = state + wide["beta"][b, t, h] * torch.outer(key, wide["value"][b, t, h] - state.T @ key)
            torch.testing.assert_close(result[b, h].double(), state, atol=1e-5, rtol=1e-5)


def test_delta_rule_leaves_the_state_alone_without_beta_and_decay():
    given = random_recurrence(tokens=4)
    given["beta"].zero_()
    given["log_decay"].zero_()
    before = given["state"].clone()
    assert torch.equal(delta_rule_state(**given, kept=[4, 4]), before)
    assert torch.equal(given["state"], before)


# Rollback against a fresh prefill


def test_every_kept_count_gives_the_state_of_a_fresh_prefill(kind):
    model = make_target(kind)
    for kept in range(1, WIDTH + 1):
        prompt = random_ids(11)
        with VerifiableTarget(model) as target:
            target.prefill(prompt)
            committed = run_round(target, prompt, kept)
            assert_same_state(target.cache, fresh_tensors(model, committed))
            assert target.state.store.attention_lengths() == [11 + kept] * len(target.state.store.attention_layers)


def test_30_random_rounds_keep_the_state_of_a_fresh_prefill(kind):
    model = make_target(kind)
    choose = random.Random(1)
    for prompt_length in (1, 70, 33):
        committed = random_ids(prompt_length)
        with VerifiableTarget(model) as target:
            target.prefill(committed)
            for _ in range(10):
                committed = run_round(target, committed, choose.randint(1, WIDTH))
                assert target.lengths == [committed.shape[1]]
                assert_same_state(target.cache, fresh_tensors(model, committed), atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("prompt_length", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", RECURRENT_KINDS)
def test_prompts_shorter_than_the_convolution_window(kind, prompt_length):
    """The convolution windows alone, where most of what they hold is still the zeros from before the prompt."""
    model = make_target(kind)
    for kept in (1, 2, 4):
        committed = random_ids(prompt_length)
        with VerifiableTarget(model) as target:
            target.prefill(committed)
            committed = run_round(target, committed, kept)
            assert_same_state(target.cache, fresh_tensors(model, committed), only="conv_states")


def test_other_widths(kind):
    model = make_target(kind)
    committed = random_ids(9)
    with VerifiableTarget(model) as target:
        target.prefill(committed)
        for kept, width in ((1, 1), (2, 4), (4, 4), (1, 2), (16, 20), (1, 8), (1, 1)):
            committed = run_round(target, committed, kept, width)
            assert_same_state(target.cache, fresh_tensors(model, committed))


def test_snapshots_survive_forwards_that_write_in_place(kind):
    """8-wide verify forwards and the model's own one-token forwards in turn, on one cache."""
    model = make_target(kind)
    name = cache_argument(model)
    committed = random_ids(6)
    with VerifiableTarget(model) as target:
        target.prefill(committed)
        for kept in (1, 8, 3, 7, 2):
            committed = run_round(target, committed, kept)
            for _ in range(2):
                token = random_ids(1)
                committed = torch.cat([committed, token], dim=1)
                mask = torch.ones_like(committed)
                model(input_ids=token, attention_mask=mask, use_cache=True, **{name: target.cache})
                target.slots.append(mask, [1])
            assert_same_state(target.cache, fresh_tensors(model, committed))


@pytest.mark.parametrize("kind", [kind for kind in TARGET_KINDS if kind in ("qwen3", "native")])
def test_recurrent_tensors_of_a_dynamic_cache_keep_their_address(kind):
    model = make_target(kind)
    committed = random_ids(6)
    with VerifiableTarget(model) as target:
        target.prefill(committed)
        addresses = [{n: t.data_ptr() for n, t in tensors_of(target.cache).items() if "states" in n}]
        for kept in (3, 8, 1):
            committed = run_round(target, committed, kept)
            addresses.append({n: t.data_ptr() for n, t in tensors_of(target.cache).items() if "states" in n})
    assert all(a == addresses[0] for a in addresses) and bool(addresses[0]) == (kind == "native")


def test_bfloat16_targets_roll_back(kind):
    """Kept rows are replayed from the verify forward's own inputs: only rounding separates it from a fresh prefill."""
    model = make_target(kind).to(torch.bfloat16)
    committed = random_ids(6)
    with VerifiableTarget(model) as target:
        target.prefill(committed)
        for kept in (3, 8, 1):
            committed = run_round(target, committed, kept)
        expected = fresh_tensors(model, committed)
        held = tensors_of(target.cache)
    assert held.keys() == expected.keys()
    for name, tensor in held.items():
        assert tensor.dtype == expected[name].dtype and torch.isfinite(tensor).all()
        if name.startswith(
            "0."
        ):  # the first layer's inputs are the embeddings: nothing before it can have rounded differently
            error = (tensor.float() - expected[name].float()).abs().max()
            assert error <= 2e-2 * expected[name].float().abs().max(), name


# The check of the recurrence: no false alarm, no wrong formula accepted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", RECURRENT_KINDS)
def test_no_target_with_a_known_recurrence_is_refused(kind, dtype):
    for seed in range(12):
        model = make_target(kind, seed=seed)
        for parameter in model.parameters():
            parameter *= (0.1, 1.0, 3.0)[seed % 3]
        model = model.to(dtype)
        with VerifiableTarget(model) as target:
            target.prefill(random_ids((1, 40, 150)[seed // 4]))
            run_round(target, random_ids(1), 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bound", [None, -1.0])
@KIMI_K3_KINDS
def test_a_wrong_gate_is_refused(kind, bound, dtype, monkeypatch):
    monkeypatch.setattr(target_state, "_gate_lower_bound", lambda mixer, config: bound)
    for seed in range(4):
        model = make_target(kind, seed=seed).to(dtype)
        with pytest.raises(ValueError, match=r"layers\.\d\.self_attn"), VerifiableTarget(model) as target:
            target.prefill(random_ids(12))
            target.verify(random_ids(WIDTH))


@pytest.mark.parametrize("kind", RECURRENT_KINDS)
def test_a_wrong_recurrence_is_refused(kind, monkeypatch):
    right = target_state.delta_rule_state
    wrong = {
        "weaker beta": lambda s, k, v, g, b, n: right(s, k, v, g, b * 0.9, n),
        "no delta": lambda s, k, v, g, b, n: (
            s * g.exp().prod(dim=1).unsqueeze(-1) + torch.einsum("bnh,bnhk,bnhv->bhkv", b, k, v)
        ),
        "decay per head": lambda s, k, v, g, b, n: right(s, k, v, g.mean(-1, keepdim=True).expand_as(g), b, n),
        "state transposed": lambda s, k, v, g, b, n: right(s.transpose(-1, -2), k, v, g, b, n),
    }
    for formula in wrong.values():
        monkeypatch.setattr(target_state, "delta_rule_state", formula)
        with pytest.raises(ValueError, match=r"layers\.0\."), VerifiableTarget(make_target(kind)) as target:
            target.prefill(random_ids(12))
            target.verify(random_ids(WIDTH))


@pytest.mark.parametrize("kind", RECURRENT_KINDS)
def test_the_check_leaves_the_state_as_the_target_made_it(kind):
    model = make_target(kind)
    prompt, block = random_ids(9), random_ids(WIDTH)
    with VerifiableTarget(model) as target:
        target.prefill(prompt)
        target.verify(block)
        assert_same_state(target.cache, fresh_tensors(model, torch.cat([prompt, block], dim=1)))
        target.commit([2], WIDTH)
        assert_same_state(target.cache, fresh_tensors(model, torch.cat([prompt, block[:, :2]], dim=1)))


# Layers of unknown structure


class Accumulator(nn.Module):
    """A made-up recurrence: y_t = S_t + x_{t-1}, S_t = S_{t-1} / 2 + x_t, with a window of the last two inputs.

    A wide forward may forget the state or the window of the forward before, as models do that expect many tokens at
    prefill only. One token at a time writes the window in place.
    """

    def __init__(self, index: int, forgets: str | None):
        super().__init__()
        self.index, self.forgets = index, forgets

    def forward(self, hidden_states, cache, position_ids=None):
        wide = hidden_states.shape[1] > 1
        assert position_ids.shape == hidden_states.shape[:2]
        zeros = torch.zeros_like(hidden_states[:, :1])
        state, window = cache.recurrent_states[self.index], cache.conv_states[self.index]
        first = zeros if state is None or (wide and self.forgets == "state") else state
        past = zeros if window is None or (wide and self.forgets == "window") else window[:, 1:]
        outputs = []
        current, previous = first, past
        for x in hidden_states.split(1, dim=1):
            current = current / 2 + x
            outputs.append(current + previous)
            previous = x
        inputs = torch.cat([zeros, past, hidden_states], dim=1)[:, -2:]
        if window is not None and not wide:
            window.copy_(inputs)
        else:
            cache.conv_states[self.index] = inputs.clone()
        cache.recurrent_states[self.index] = current
        return torch.cat(outputs, dim=1)


class UnknownLayer(nn.Module):
    """A decoder layer around it; `hides_cache`: its own forward, not a child's, works on the cache."""

    def __init__(self, index: int, forgets: str | None, hides_cache: bool):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(6)
        mixer = Accumulator(index, forgets)
        self.run = mixer.forward if hides_cache else None
        self.mixer = nn.Linear(6, 6) if hides_cache else mixer

    def forward(self, hidden, cache, position_ids):
        return hidden + (self.run or self.mixer)(self.input_layernorm(hidden), cache=cache, position_ids=position_ids)


class UnknownModel(nn.Module):
    """A language model of such layers, whose cache keeps lists over layers as Kimi K3's own does."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, forgets: str | None = None, hides_cache: bool = False):
        super().__init__()
        self.model = nn.Module()
        self.model.config = SimpleNamespace(num_hidden_layers=3, vocab_size=12)
        self.model.embed_tokens = nn.Embedding(12, 6)
        self.model.layers = nn.ModuleList(UnknownLayer(i, forgets, hides_cache) for i in range(3))
        self.model.norm = nn.LayerNorm(6)
        self.lm_head = nn.Linear(6, 12)

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None, return_dict=None):
        fields = ("conv_states", "recurrent_states", "key_cache", "value_cache")
        cache = past_key_values or SimpleNamespace(**{name: [None] * 3 for name in fields})
        past = (attention_mask.shape[1] if attention_mask is not None else input_ids.shape[1]) - input_ids.shape[1]
        position_ids = torch.arange(past, past + input_ids.shape[1])[None]
        hidden = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            hidden = layer(hidden, cache, position_ids)
        return CausalLMOutputWithPast(logits=self.lm_head(self.model.norm(hidden)), past_key_values=cache)


def test_an_unknown_recurrent_layer_is_replayed_by_its_own_forward():
    model = UnknownModel()
    committed = random_ids(5)
    with VerifiableTarget(model, (0, 2)) as target:
        target.prefill(committed)
        for kept in (1, 3, 8, 2, 7, 1):
            committed = run_round(target, committed, kept)
            assert_same_state(target.cache, fresh_tensors(model, committed))


@pytest.mark.parametrize("forgets", ["state", "window"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_an_unknown_layer_whose_wide_forward_forgets_is_refused_at_prefill(forgets, scale):
    """A forgotten window does not show in the state once a forward is as wide as the window: only in what comes out."""
    model = UnknownModel(forgets)
    model.model.embed_tokens.weight *= scale
    with pytest.raises(ValueError, match=r"layers\.0"), VerifiableTarget(model, (0,)) as target:
        target.prefill(torch.full((1, 5), 3))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_unknown_layer_that_hides_its_recurrence_is_refused_at_prefill():
    with pytest.raises(ValueError, match=r"layers\.0.*input_layernorm, mixer"):
        with VerifiableTarget(UnknownModel(hides_cache=True), (0,)) as target:
            target.prefill(random_ids(5))


def test_a_check_may_be_followed_by_a_rollback_of_the_same_round():
    """Replaying one token at a time writes in place; what was kept for the rollback must not be what is written to."""
    model = UnknownModel()
    prompt, block = random_ids(5), random_ids(WIDTH)
    with VerifiableTarget(model) as target:
        target.prefill(prompt)
        target._checked_width = 0
        target.verify(block)
        target.commit([1], WIDTH)
        assert_same_state(target.cache, fresh_tensors(model, torch.cat([prompt, block[:, :1]], dim=1)))


def qwen3_next(seed: int, scale: float):
    torch.manual_seed(seed)
    config = transformers.Qwen3NextConfig(
        vocab_size=12,
        hidden_size=32,
        num_hidden_layers=4,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        initializer_range=scale,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.Qwen3NextForCausalLM(config).eval()


@pytest.mark.parametrize("scale", [0.02, 0.3, 1.0])
def test_qwen3_next_works_or_is_refused_at_prefill(scale):
    """Its wide forward takes up the cached state on transformers 5; on 4.57 it starts from nothing."""
    for seed in range(5):
        model = qwen3_next(seed, scale)
        committed = random_ids(13)
        with VerifiableTarget(model, (0, 3)) as target:
            if not HAS_NATIVE_KIMI:
                with pytest.raises(ValueError, match=r"layers\.0.*LayerReplay"):
                    target.prefill(committed)
                continue
            target.prefill(committed)
            for kept in (1, 5, 8):
                committed = run_round(target, committed, kept)
            assert_same_state(target.cache, fresh_tensors(model, committed), atol=2e-3, rtol=2e-3)


# Caches


def test_a_dynamic_cache_with_state_beside_its_layers_is_refused():
    """MiniMax keeps its recurrent states in a list of its own, where cutting keys and values would not reach them."""
    config = transformers.MiniMaxConfig(
        vocab_size=12,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=2,
        layer_types=["linear_attention", "full_attention"],
        bos_token_id=1,
        eos_token_id=2,
        sliding_window=None,
    )
    with (
        pytest.raises(ValueError, match="MiniMaxCache"),
        VerifiableTarget(transformers.MiniMaxForCausalLM(config).eval()) as target,
    ):
        target.prefill(random_ids(5))


@pytest.mark.parametrize("cache", [(), SimpleNamespace(conv_states=[], ssm_states=[]), SimpleNamespace(layers=None)])
def test_unknown_caches_are_refused_by_type(cache):
    with pytest.raises(ValueError, match=f"`{type(cache).__name__}`"):
        open_store(cache)


def test_layers_holding_unknown_states_beside_keys_are_refused():
    """Running such a layer again would append keys and values a second time."""
    layer = nn.Module()
    layer.mixer = nn.Linear(2, 2)
    cache = SimpleNamespace(
        conv_states=[torch.zeros(1, 2, 2)],
        recurrent_states=[torch.zeros(1, 1, 2, 2)],
        key_cache=[torch.zeros(1, 1, 3, 2)],
        value_cache=[torch.zeros(1, 1, 3, 2)],
    )
    with pytest.raises(ValueError, match=r"layers\.0.*keys"):
        TargetState(cache, nn.ModuleList([layer]), SimpleNamespace())


def test_the_gate_bound_is_found_in_module_or_config():
    """Where a mixer does not keep the bound, the text config says it; without any it is the unbounded gate."""
    model = make_target("text")
    backbone = locate_text_model(model)[0]
    store = open_store(model(input_ids=random_ids(3), use_cache=True).past_key_values)

    def bound(config):
        return target_state.find_replay(backbone.layers[0], 0, store, config).lower_bound

    assert isinstance(target_state.find_replay(backbone.layers[0], 0, store, backbone.config), ReleasedDeltaReplay)
    assert bound(SimpleNamespace()) == -5.0
    backbone.layers[0].self_attn.gate_lower_bound = None
    assert bound(SimpleNamespace(linear_attn_config={"gate_lower_bound": -4.0})) == -4.0
    assert bound(SimpleNamespace(linear_attn_config=None, gate_lower_bound=-3.0)) == -3.0
    assert bound(SimpleNamespace(linear_attn_config={})) is None


def test_the_unbounded_gate_rolls_back():
    """The Kimi Linear that came before K3: log decay -exp(A_log) softplus(x)."""
    model = make_target("text")
    model.config.linear_attn_config["gate_lower_bound"] = None
    for layer in model.model.layers[:3]:
        mixer = layer.self_attn
        mixer.gate_lower_bound = None
        mixer.log_decay = lambda raw, mixer=mixer: (
            -mixer.A_log.exp() * F.softplus((raw + mixer.dt_bias).unflatten(-1, (mixer.num_heads, mixer.head_dim)))
        )
    committed = random_ids(9)
    with VerifiableTarget(model) as target:
        target.prefill(committed)
        for kept in (2, 8, 5):
            committed = run_round(target, committed, kept)
            assert_same_state(target.cache, fresh_tensors(model, committed))
