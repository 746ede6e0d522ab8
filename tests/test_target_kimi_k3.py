"""The target side: taps against a mixture worked by hand, the head, discovery, images, offloading, leaving no trace.

What follows a rollback is judged from outside here, by logits and features; `test_target_state.py` compares the state
itself.
"""

import copy
import gc
import weakref
from types import SimpleNamespace

import accelerate
import pytest
import torch
import transformers
from conftest import HAS_NATIVE_KIMI, PLACEHOLDER_ID, TARGET_KINDS, make_target, random_ids, text_config
from dspark.target_kimi_k3 import VerifiableTarget, cache_argument, locate_text_model
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

WIDTH = 8
ALL_LAYERS = (0, 1, 2, 3, 4)
KIMI_K3_KINDS = pytest.mark.parametrize("kind", ["text", "wrapper"])


pytestmark = pytest.mark.usefixtures("no_grad")


def run_rounds(target: VerifiableTarget, prompt: torch.Tensor, kept_counts, expected_model=None) -> torch.Tensor:
    """Prefill and verify rounds; each round's logits are those of an uncached forward. Returns the committed ids."""
    model, committed = expected_model or target.model, prompt
    target.prefill(prompt)
    for kept in kept_counts:
        block = random_ids(WIDTH)
        expected = model(input_ids=torch.cat([committed, block], dim=1)).logits[:, -WIDTH:]
        torch.testing.assert_close(target.verify(block).logits, expected, atol=3e-4, rtol=1e-4)
        target.commit([kept], WIDTH)
        committed = torch.cat([committed, block[:, :kept]], dim=1)
        assert target.lengths == [committed.shape[1]]
    return committed


def features_of(model, ids: torch.Tensor, tap_ids) -> torch.Tensor:
    with VerifiableTarget(model, tap_ids) as target:
        return target.prefill(ids).features


def count_hooks(model) -> dict[str, tuple[int, int, int]]:
    return {
        name: (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
        for name, m in model.named_modules()
    }


class FakeDecoder(nn.Module):
    """A decoder of zeros in which layer i adds 10**i, so that a tap spells out which layers it has seen."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, num_layers: int = 5, calls_head: bool = True):
        super().__init__()
        self.model = nn.Module()
        self.model.config = SimpleNamespace(num_hidden_layers=num_layers)
        self.model.embed_tokens = nn.Embedding(12, 4, _weight=torch.zeros(12, 4))
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(num_layers))
        for layer in self.model.layers:
            layer.input_layernorm = nn.LayerNorm(4)
        self.model.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 12)
        self.calls_head = calls_head
        self.cache = transformers.DynamicCache()

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None, return_dict=None):
        hidden = self.model.embed_tokens(input_ids)
        for i, layer in enumerate(self.model.layers):
            layer.input_layernorm(hidden)
            hidden = hidden + 10**i
        hidden = self.model.norm(hidden)
        logits = (
            self.lm_head(hidden) if self.calls_head else nn.functional.linear(hidden, self.model.embed_tokens.weight)
        )
        return CausalLMOutputWithPast(logits=logits, past_key_values=self.cache)


# Taps


@KIMI_K3_KINDS
def test_taps_of_kimi_k3_are_the_mixtures_the_next_norm_reads(kind):
    """KDA layers 0 to 2, MLA layers 3 and 4, the last into the final norm; in float64 from prefix sums and weights."""
    model = make_target(kind)
    backbone, _ = locate_text_model(model)
    for parameter_name, parameter in backbone.named_parameters():
        if "_res_norm" in parameter_name:
            nn.init.uniform_(parameter, 0.2, 2.0)
    last_prefix_sum = []
    backbone.layers[-1].register_forward_hook(lambda module, args, output: last_prefix_sum.append(output[1]))
    ids = random_ids(9)
    features = features_of(model, ids, ALL_LAYERS)
    raw = backbone(ids, output_hidden_states=True).hidden_states
    prefix_sums = [
        *raw[:-1],
        last_prefix_sum[-1],
    ]  # entry i is the prefix sum that enters layer i; the last leaves layer 4
    for tap_id, tap in enumerate(features.chunk(5, dim=-1)):
        following = backbone if tap_id == 4 else backbone.layers[tap_id + 1]
        name = "output_attn_res" if tap_id == 4 else "self_attention_res"
        candidates = [prefix_sums[i].double() for i in range(0, tap_id + 1, 2)] + [prefix_sums[tap_id + 1].double()]
        direction = (getattr(following, f"{name}_norm").weight * getattr(following, f"{name}_proj").weight[0]).double()
        scores = [c / (c.square().mean(-1, keepdim=True) + 1e-5).sqrt() @ direction for c in candidates]
        weights = torch.stack(scores).softmax(dim=0)
        mixture = sum(w[..., None] * c for w, c in zip(weights, candidates))
        torch.testing.assert_close(tap.double(), mixture, atol=2e-5, rtol=2e-5)
        assert (tap - raw[tap_id + 1]).abs().max() > 0.1, "the raw prefix sum is not a tap"


@pytest.mark.parametrize("plain_kind", [kind for kind in TARGET_KINDS if kind in ("qwen3", "native")])
def test_taps_of_a_plain_decoder_are_the_residual_stream(plain_kind):
    model = make_target(plain_kind)
    ids = random_ids(9)
    taps = features_of(model, ids, ALL_LAYERS).chunk(5, dim=-1)
    hidden_states = model(input_ids=ids, output_hidden_states=True).hidden_states
    for tap_id in range(4):
        torch.testing.assert_close(taps[tap_id], hidden_states[tap_id + 1])
    torch.testing.assert_close(model.model.norm(taps[4]), hidden_states[5])
    assert (taps[4] - hidden_states[5]).abs().max() > 0.1


def test_tap_ids_count_from_zero_and_keep_their_order():
    features = features_of(FakeDecoder(), random_ids(3), (3, 0, 4, 1))
    assert features.shape == (1, 3, 16)
    assert features[0, -1, ::4].tolist() == [1111.0, 1.0, 11111.0, 11.0]


@pytest.mark.parametrize("tap_id", [-1, 5])
def test_tap_ids_out_of_range_are_refused(tap_id):
    model = FakeDecoder()
    with pytest.raises(ValueError, match=rf"{tap_id}.*0.*5 layers"):
        VerifiableTarget(model, (0, tap_id)).__enter__()
    assert not any(map(any, count_hooks(model).values()))


def test_features_do_not_depend_on_how_the_prompt_is_cut(kind):
    model = make_target(kind)
    ids = random_ids(23)
    whole = features_of(model, ids, (0, 3, 4))
    with VerifiableTarget(model, (0, 3, 4)) as target:
        pieces = [target.prefill(piece) for piece in ids.split([1, 7, 2, 13], dim=1)]
        torch.testing.assert_close(torch.cat([p.features for p in pieces], dim=1), whole, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(pieces[-1].logits, model(input_ids=ids).logits[:, -1:], atol=3e-4, rtol=1e-4)
        verified = target.verify(random_ids(WIDTH))
    assert verified.features.shape == (1, WIDTH, 96)


def test_tapped_tensors_are_freed_with_the_features(kind):
    model = make_target(kind)
    backbone, head = locate_text_model(model)
    tapped = []
    with VerifiableTarget(model, ALL_LAYERS) as target:
        for module in [layer.input_layernorm for layer in backbone.layers] + [backbone.norm, head]:
            module.register_forward_pre_hook(lambda module, args: tapped.append(weakref.ref(args[0])))
        for step in (target.prefill, target.verify):
            del tapped[:]
            step(random_ids(WIDTH))
            gc.collect()
            assert tapped and not [ref for ref in tapped if ref() is not None]


def test_pieces_of_a_long_prompt_leave_no_activations_behind(kind):
    """What a rollback needs of a verify forward is small; of a long piece of a prompt it would be gigabytes."""
    model = make_target(kind)
    outputs = []
    with VerifiableTarget(model, ALL_LAYERS) as target:
        target.prefill(random_ids(4))
        for module in model.modules():
            if not list(module.children()):
                module.register_forward_hook(
                    lambda module, args, output: outputs.append(
                        weakref.ref(output[0] if isinstance(output, tuple) else output)
                    )
                )
        target.prefill(random_ids(50))
        gc.collect()
        assert not [ref().shape for ref in outputs if ref() is not None and 50 in ref().shape]


# Head and embedding


def test_head_sees_only_the_rows_that_are_needed(kind, monkeypatch):
    model = make_target(kind)
    head = locate_text_model(model)[1]
    rows, linear = [], nn.functional.linear

    def spy(hidden, weight, bias=None):
        if weight is head.weight:
            rows.append(hidden.shape[1])
        return linear(hidden, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", spy)
    with VerifiableTarget(model, (0,)) as target:
        assert target.prefill(random_ids(20)).logits.shape == (1, 1, 12)
        assert target.prefill(random_ids(5)).logits.shape == (1, 1, 12)
        assert target.head(torch.randn(1, 7, 32)).shape == (1, 7, 12)  # the draft's use, not cut
        assert target.verify(random_ids(WIDTH)).logits.shape == (1, WIDTH, 12)
        assert target.head(torch.randn(1, 3, 32)).shape == (1, 3, 12)
    assert rows == [1, 1, 7, WIDTH, 3]


class Lookup(nn.Module):
    """An embedding without `.weight`."""

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self.table = nn.Parameter(embedding.weight.detach().clone())

    def forward(self, ids):
        return self.table[ids]


class WrappedHead(nn.Module):
    """A head that is a module around a linear one."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.inner = linear

    def forward(self, hidden):
        return self.inner(hidden) * 2.0


def test_embedding_and_head_are_called_as_modules(kind):
    model = make_target(kind)
    backbone, head = locate_text_model(model)
    ids, hidden = random_ids(4), torch.randn(1, 3, 32)
    expected = backbone.embed_tokens(ids), 2.0 * head(hidden)
    backbone.embed_tokens = Lookup(backbone.embed_tokens)
    (model.language_model if kind == "wrapper" else model).lm_head = WrappedHead(head)
    with VerifiableTarget(model, (0,)) as target:
        run_rounds(target, random_ids(6), [3, 8, 1])
        torch.testing.assert_close(target.embed(ids), expected[0], rtol=0, atol=0)
        torch.testing.assert_close(target.head(hidden), expected[1])


def test_head_takes_any_dtype_before_and_after_a_forward(kind):
    model = make_target(kind).to(torch.bfloat16)
    target = VerifiableTarget(model)
    hidden = torch.randn(1, 7, 32)
    expected = locate_text_model(model)[1](hidden.to(torch.bfloat16))
    assert torch.equal(target.head(hidden), expected)
    assert target.embed(random_ids(3)).dtype == torch.bfloat16
    with target:
        target.prefill(random_ids(5))
        assert torch.equal(target.head(hidden), expected)


# Finding the parts


def test_locates_backbone_head_and_cache_argument(kind):
    model = make_target(kind)
    backbone, head = locate_text_model(model)
    text = model.language_model if kind == "wrapper" else model
    assert backbone is text.model and head is text.lm_head
    assert VerifiableTarget(model).config is backbone.config
    renamed = HAS_NATIVE_KIMI and kind in ("qwen3", "native")
    assert cache_argument(model) == ("cache" if renamed else "past_key_values")


def test_wrap_keeps_what_is_wrapped():
    model = make_target("qwen3")
    target = VerifiableTarget.wrap(model)
    assert target.model is model and VerifiableTarget.wrap(target) is target


def test_backbones_without_a_head_are_refused(kind):
    backbone = locate_text_model(make_target(kind))[0]
    with pytest.raises(ValueError, match=f"{type(backbone).__name__}.*AutoModelForCausalLM"):
        VerifiableTarget(backbone)


@pytest.mark.parametrize("unrelated", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), "moonshotai/Kimi-K3"])
def test_unrelated_objects_are_refused(unrelated):
    with pytest.raises(ValueError, match=f"{type(unrelated).__name__}.*AutoModelForCausalLM"):
        VerifiableTarget(unrelated)


def test_cached_forwards_get_the_mask_over_past_and_block(kind):
    model = make_target(kind)
    seen = []
    with VerifiableTarget(model) as target:
        model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((kwargs["attention_mask"], cache_argument(model) in kwargs)),
            with_kwargs=True,
        )
        run_rounds(target, random_ids(6), [])
        for kept in (2, 5):
            target.verify(random_ids(WIDTH))
            target.commit([kept], WIDTH)
    assert [(list(mask.shape), cached) for mask, cached in seen] == [([1, 6], False), ([1, 14], True), ([1, 16], True)]
    assert all(bool((mask == 1).all()) for mask, _ in seen)


# Rounds seen from outside


def test_rounds_of_every_kept_count_equal_an_uncached_forward(kind):
    with VerifiableTarget(make_target(kind), (0, 4)) as target:
        run_rounds(target, random_ids(11), [1, 2, 3, 4, 5, 6, 7, 8])


def test_features_after_a_rollback_are_those_of_a_fresh_prefill(kind):
    model = make_target(kind)
    with VerifiableTarget(model, (0, 2, 4)) as target:
        committed = run_rounds(target, random_ids(3), [5, 1])
        block = random_ids(WIDTH)
        features = target.verify(block).features
    expected = features_of(model, torch.cat([committed, block], dim=1), (0, 2, 4))[:, -WIDTH:]
    torch.testing.assert_close(features, expected, atol=3e-4, rtol=1e-4)


def test_another_forward_between_verify_and_commit_changes_nothing(kind):
    """A logits processor may ask the target itself, on a cache of its own, while a round is being judged."""
    model = make_target(kind)
    with VerifiableTarget(model, (0,)) as target, VerifiableTarget(model, (1,)) as other:
        prompt, block = random_ids(9), random_ids(WIDTH)
        target.prefill(prompt)
        other.prefill(random_ids(4))
        for kept in (8, 3):
            target.verify(block)
            model(input_ids=random_ids(20), use_cache=True)
            other.verify(random_ids(WIDTH))
            target.commit([kept], WIDTH)
            other.commit([1], WIDTH)
        committed = torch.cat([prompt, block, block[:, :3]], dim=1)
        expected = model(input_ids=torch.cat([committed, block], dim=1)).logits[:, -WIDTH:]
        torch.testing.assert_close(target.verify(block).logits, expected, atol=3e-4, rtol=1e-4)


def test_leaving_forgets_and_entering_again_starts_anew(kind):
    target = VerifiableTarget(make_target(kind), (0, 4))
    for prompt_length in (5, 9):
        with target:
            run_rounds(target, random_ids(prompt_length), [2, 5])
        assert target.lengths == [] and target.cache is None


def test_the_cache_is_freed_on_leaving_even_after_an_error(kind):
    model = make_target(kind)
    held = []
    with pytest.raises(RuntimeError, match="in the middle"), VerifiableTarget(model, (0,)) as target:
        run_rounds(target, random_ids(5), [3])
        held.append(weakref.ref(target.cache))
        raise RuntimeError("in the middle")
    gc.collect()
    assert held[0]() is None


def test_a_second_turn_goes_on_from_the_first(kind):
    model = make_target(kind)
    with VerifiableTarget(model, (0,)) as target:
        committed = run_rounds(target, random_ids(5), [2, 7])
        turn = random_ids(6)
        logits = target.prefill(turn).logits
    expected = model(input_ids=torch.cat([committed, turn], dim=1)).logits[:, -1:]
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=1e-4)


def test_images_count_as_many_positions_as_they_expand_to():
    model = make_target("wrapper")
    patch = model.config.vision_config["patch_size"]
    ids = torch.tensor([[1, PLACEHOLDER_ID, 2, 3, PLACEHOLDER_ID, 4]])
    images = {"pixel_values": torch.randn(16 + 8, 3, patch, patch), "grid_thws": torch.tensor([[1, 4, 4], [1, 2, 4]])}
    with VerifiableTarget(model, (0, 3, 4)) as target:
        output = target.prefill(ids, **images)
        assert (
            target.lengths == [4 + 4 + 2] and output.features.shape == (1, 10, 96) and output.logits.shape == (1, 1, 12)
        )
        committed = torch.empty(1, 0, dtype=torch.long)
        for kept in (3, 8, 1):
            block = random_ids(WIDTH)
            with VerifiableTarget(model, (0, 3, 4)) as plain:
                plain.prefill(ids, **images)
                steps = [plain.prefill(token) for token in torch.cat([committed, block], dim=1).split(1, dim=1)]
            verified = target.verify(block)
            torch.testing.assert_close(
                verified.logits, torch.cat([s.logits for s in steps], dim=1)[:, -WIDTH:], atol=3e-4, rtol=1e-4
            )
            torch.testing.assert_close(
                verified.features, torch.cat([s.features for s in steps], dim=1)[:, -WIDTH:], atol=3e-4, rtol=1e-4
            )
            target.commit([kept], WIDTH)
            committed = torch.cat([committed, block[:, :kept]], dim=1)
            assert target.lengths == [10 + committed.shape[1]]


# Leaving no trace


def trace_of(model) -> tuple:
    flags = {name: (p.requires_grad, p.dtype) for name, p in model.named_parameters()}
    generation_config = getattr(model, "generation_config", None)
    configs = [m.config.to_dict() for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]
    return count_hooks(model), flags, copy.deepcopy(configs), copy.deepcopy(generation_config), model.training


def raise_in_layer(model, error):
    return locate_text_model(model)[0].layers[3].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(error))


def test_the_model_is_as_before_after_success_error_and_interruption(kind):
    model = make_target(kind)
    model(input_ids=random_ids(2), output_hidden_states=True)  # transformers adds hooks of its own at the first call
    before, weights = trace_of(model), copy.deepcopy(model.state_dict())
    with VerifiableTarget(model, ALL_LAYERS) as target:
        run_rounds(target, random_ids(5), [2, 8])
    assert trace_of(model) == before
    for error in (RuntimeError("in the middle"), KeyboardInterrupt()):
        for verified in (False, True):
            with pytest.raises(type(error)), VerifiableTarget(model, ALL_LAYERS) as target:
                if verified:
                    target.prefill(random_ids(5))
                handle = raise_in_layer(model, error)
                try:
                    (target.verify if verified else target.prefill)(random_ids(WIDTH))
                finally:
                    handle.remove()
            assert trace_of(model) == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    with VerifiableTarget(model, ALL_LAYERS) as target:  # and it still works
        run_rounds(target, random_ids(5), [1])


# Refusals


def test_targets_that_do_not_call_their_head_are_refused():
    with pytest.raises(ValueError, match="lm_head"), VerifiableTarget(FakeDecoder(calls_head=False), (0,)) as target:
        target.prefill(random_ids(3))


def test_sliding_windows_are_refused_by_name():
    config = transformers.Qwen3Config(
        vocab_size=12,
        hidden_size=32,
        num_hidden_layers=3,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    before = count_hooks(model)
    with (
        pytest.raises(ValueError, match="Layer 1 .*DynamicSlidingWindowLayer"),
        VerifiableTarget(model, (0,)) as target,
    ):
        target.prefill(random_ids(3))
    assert count_hooks(model) == before


def test_layers_without_an_input_norm_are_refused_by_name():
    """Layers that norm only their outputs: there is no place where the hidden states could be tapped."""
    model = transformers.Olmo2ForCausalLM(
        transformers.Olmo2Config(
            vocab_size=12,
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=48,
            num_attention_heads=2,
            pad_token_id=0,
            eos_token_id=2,
        )
    ).eval()
    with pytest.raises(ValueError, match=r"layers\.1.*Olmo2DecoderLayer.*input_layernorm"):
        VerifiableTarget(model, (0,)).__enter__()
    assert not any(map(any, count_hooks(model).values()))


def test_targets_without_a_cache_in_their_output_are_refused():
    model = FakeDecoder()
    model.cache = None
    with pytest.raises(ValueError, match="FakeDecoder.*cache"), VerifiableTarget(model, (0,)) as target:
        target.prefill(random_ids(3))


# Offloaded and packed weights: the target's parameters are its own business


def offload(model, kind: str, how: str, folder) -> None:
    """By accelerate, as users do. Kimi K3 reads some weights outside of their modules' forwards: it loads by layer."""
    backbone, head = locate_text_model(model)
    by_layer = ["KimiDecoderLayer"] if kind in ("text", "wrapper") else []
    if how == "dispatch":
        device_map = {}
        for name, _ in model.named_parameters():
            module_name, _, rest = name.partition("layers.")
            layer = rest.split(".")[0]
            place = "disk" if layer in ("1", "3") else "cpu"
            device_map[f"{module_name}layers.{layer}" if rest else name.rpartition(".")[0]] = place
        accelerate.dispatch_model(
            model, device_map, offload_dir=folder, preload_module_classes=by_layer, force_hooks=True
        )
        return
    modules = [backbone.embed_tokens, *backbone.layers, backbone.norm, head] if by_layer else [model]
    for number, module in enumerate(modules):
        if how == "cpu":
            accelerate.cpu_offload(module, execution_device="cpu", preload_module_classes=by_layer)
        else:
            accelerate.disk_offload(
                module, folder / str(number), execution_device="cpu", preload_module_classes=by_layer
            )


@pytest.mark.parametrize("how", ["cpu", "disk", "dispatch"])
def test_offloaded_targets_are_exact_and_keep_their_hooks(kind, how, tmp_path):
    model, reference = make_target(kind), make_target(kind)
    ids, hidden = random_ids(4), torch.randn(1, 3, 32)
    expected = VerifiableTarget(reference).embed(ids), VerifiableTarget(reference).head(hidden)
    offload(model, kind, how, tmp_path)
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    hooked = [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")]
    with VerifiableTarget(model, (0, 1, 4)) as target:
        torch.testing.assert_close(target.embed(ids), expected[0], rtol=0, atol=0)
        torch.testing.assert_close(target.head(hidden), expected[1])
        run_rounds(target, random_ids(6), [3, 8, 1, 5], expected_model=reference)
        torch.testing.assert_close(target.head(hidden), expected[1])
    assert [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")] == hooked
    assert any(parameter.device.type == "meta" for parameter in model.parameters())


class PackedLinear(nn.Module):
    """A linear layer with integer weights and a scale, as quantised targets have them."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scale = linear.weight.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight / scale).round().to(torch.int8))

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


def test_packed_linear_layers_work(kind):
    model = make_target(kind)
    packed = 0
    for module in locate_text_model(model)[0].layers.modules():
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name.endswith("_proj") and "_res_" not in name:
                setattr(module, name, PackedLinear(child))
                packed += 1
    assert packed >= 20
    with VerifiableTarget(model, (0, 3)) as target:
        run_rounds(target, random_ids(6), [3, 8, 1, 5])


def test_a_deeper_model_with_another_block_size_works():
    """Nothing depends on the small configuration: 9 layers, blocks of 4, full attention in the middle and the end."""
    linear = dict(text_config().linear_attn_config, kda_layers=[1, 2, 3, 5, 6, 7], full_attn_layers=[4, 8, 9])
    model = make_target("text", num_hidden_layers=9, attn_res_block_size=4, linear_attn_config=linear)
    with VerifiableTarget(model, (2, 3, 8)) as target:
        run_rounds(target, random_ids(7), [4, 1, 8, 6])
