"""The tiny Kimi K3 in examples/ against plainly written formulas, and cached against uncached forwards.

Random weights throughout, except where the shipped folder itself is loaded.
"""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers.dynamic_module_utils
from tiny_kimi_k3 import configuration_kimi_k3 as configuration
from tiny_kimi_k3 import modeling_kimi_k3 as modeling
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "tiny-kimi-k3"
SPLITS = {"one at a time": [1] * 24, "eight wide": [8] * 3, "mixed": [5, 1, 8, 1, 1, 8]}


def small_config(**changes):
    """Seven thin layers: full attention at 3, 6, 7 (1-based), snapshots at 0, 2, 4, 6."""
    linear = {"kda_layers": [1, 2, 4, 5], "full_attn_layers": [3, 6, 7], "num_heads": 2, "head_dim": 8}
    linear.update(short_conv_kernel_size=4, gate_lower_bound=-5.0)
    settings = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=2)
    settings.update(q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
    settings.update(num_experts=4, moe_intermediate_size=12, routed_expert_hidden_size=16, attn_res_block_size=2)
    return configuration.KimiLinearConfig(linear_attn_config=linear, initializer_range=0.15, **settings, **changes)


def shake(model):
    """Random values where initialisation is flat (norms, gates, correction biases), so that each of them matters."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "A_log" in name or "correction_bias" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@pytest.fixture(scope="module")
def text_model():
    torch.manual_seed(0)
    return shake(modeling.KimiLinearForCausalLM(small_config()))


@pytest.fixture(scope="module")
def wrapper():
    torch.manual_seed(1)
    config = configuration.KimiK3Config(
        text_config=small_config(),
        vision_config={"patch_size": 4, "hidden_size": 6, "merge_size": 2},
        media_placeholder_token_id=90,
        mask_token_id=91,
    )
    return shake(modeling.KimiK3ForConditionalGeneration(config))


def random_ids(batch, length, seed=0):
    return torch.randint(0, 90, (batch, length), generator=torch.Generator().manual_seed(seed))


def feed(model, input_ids, widths, attention_mask=None):
    """Logits [B, T, vocabulary] and cache after feeding input_ids piece by piece, with the mask grown alongside."""
    cache, logits, start = None, [], 0
    for width in widths:
        mask = None if attention_mask is None else attention_mask[:, : start + width]
        outputs = model(input_ids[:, start : start + width], attention_mask=mask, past_key_values=cache)
        cache = outputs.past_key_values
        logits.append(outputs.logits)
        start += width
    return torch.cat(logits, dim=1), cache


def cache_tensors(cache):
    """Every tensor of a cache, by field and layer."""
    tensors = {}
    for layer in range(len(cache.key_cache)):
        for window, name in zip(cache.conv_states[layer] or (), "qkv", strict=False):
            tensors[f"{layer}.conv_{name}"] = window
        for field in ("recurrent_states", "key_cache", "value_cache"):
            if getattr(cache, field)[layer] is not None:
                tensors[f"{layer}.{field}"] = getattr(cache, field)[layer]
    return tensors


def assert_same_cache(actual, expected):
    actual, expected = cache_tensors(actual), cache_tensors(expected)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, atol=2e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


# KDA


def kda_formula(q, k, v, g, beta, state):
    """The recurrence for one batch row, one step and head at a time, in float64.

    Returns outputs [1, T, N, V] and the state after each step, [T, 1, N, V, K], both float32.
    """
    q, k, v, g, beta, state = (x[0].double() for x in (q, k, v, g, beta, state))
    outputs, states = torch.zeros_like(v), torch.zeros(len(q), 1, *state.shape)
    for n in range(q.shape[1]):
        s = state[n].T
        for t in range(len(q)):
            s = torch.diag(g[t, n].exp()) @ s
            s = s + beta[t, n] * torch.outer(k[t, n], v[t, n] - s.T @ k[t, n])
            outputs[t, n] = s.T @ q[t, n] * q.shape[-1] ** -0.5
            states[t, 0, n] = s.T
    return outputs[None].float(), states


@pytest.mark.parametrize("gate", ["weak", "strongest", "on and off"])
@pytest.mark.parametrize("kernel", ["kda_chunk", "kda_recurrent"])
def test_kda_kernels_equal_the_formula_at_every_length(kernel, gate):
    generator, shape = torch.Generator().manual_seed(0), (1, 70, 2, 8)
    uniform = torch.rand(shape, generator=generator)
    g = {"weak": -0.05 * uniform, "strongest": torch.full(shape, -5.0), "on and off": -5.0 * (uniform < 0.3)}[gate]
    q, k = (modeling.l2_normalise(torch.randn(shape, generator=generator)) for _ in range(2))
    v, beta = torch.randn(1, 70, 2, 6, generator=generator), torch.rand(shape[:3], generator=generator)
    initial = torch.randn(1, 2, 6, 8, generator=generator)
    before = initial.clone()
    outputs, states = kda_formula(q, k, v, g, beta, initial)
    for length in range(1, 71):
        output, state = getattr(modeling, kernel)(*(x[:, :length] for x in (q, k, v, g, beta)), initial)
        torch.testing.assert_close(output, outputs[:, :length], atol=1e-5, rtol=0)
        torch.testing.assert_close(state, states[length - 1], atol=1e-5, rtol=0)
    assert torch.equal(initial, before)


def test_kda_gradients_through_the_strongest_gate_equal_the_recurrent_ones():
    shape = (1, 40, 2, 8)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(shape, generator=generator, requires_grad=True) for _ in range(3))
    g = (-5.0 * torch.rand(shape, generator=generator)).requires_grad_()
    beta = torch.rand(shape[:3], generator=generator, requires_grad=True)
    gradients = []
    for kernel in (modeling.kda_chunk, modeling.kda_recurrent):
        output, state = kernel(modeling.l2_normalise(q), modeling.l2_normalise(k), v, g, beta)
        gradients.append(torch.autograd.grad(output.square().sum() + state.square().sum(), [q, k, v, g, beta]))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-4)


def test_steps_without_gate_and_beta_are_the_identity():
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 8, 2, 8, generator=generator) for _ in range(3))
    state = torch.randn(1, 2, 8, 8, generator=generator)
    for kernel in (modeling.kda_chunk, modeling.kda_recurrent):
        _, after = kernel(q, k, v, torch.zeros_like(q), torch.zeros(1, 8, 2), state)
        assert torch.equal(after, state)


def test_log_decay_stays_between_the_bound_and_zero(text_model):
    attention = text_model.model.layers[0].self_attn
    raw = torch.linspace(-40, 40, 16 * 3).view(1, 3, 16)
    g = attention.log_decay(raw)
    head_scale = attention.A_log.flatten().exp()[:, None]
    expected = -5 / (1 + torch.exp(-head_scale * (raw + attention.dt_bias).view(1, 3, 2, 8)))
    torch.testing.assert_close(g, expected)
    assert g.min() >= -5 and g.max() <= 0


def test_short_convolution_window_is_in_place_for_one_token_and_new_for_more():
    torch.manual_seed(0)
    convolution = modeling.ShortConvolution(3, 4)
    torch.nn.init.normal_(convolution.weight)
    x = torch.randn(2, 9, 3)
    padded = F.pad(x, (0, 0, 3, 0))
    expected = F.silu(sum(padded[:, j : j + 9] * convolution.weight[:, 0, j] for j in range(4)))

    y, window = convolution(x=x[:, :2], cache=None, output_final_state=True)
    torch.testing.assert_close(window, F.pad(x[:, :2].mT, (2, 0)))
    one, same = convolution(x=x[:, 2:3], cache=window, output_final_state=True)
    assert same is window
    torch.testing.assert_close(same, F.pad(x[:, :3].mT, (1, 0)))
    kept = same.clone()
    rest, new = convolution(x=x[:, 3:], cache=same, output_final_state=True)
    assert new.data_ptr() != same.data_ptr() and torch.equal(same, kept)
    torch.testing.assert_close(new, x[:, -4:].mT)
    torch.testing.assert_close(torch.cat([y, one, rest], dim=1), expected)
    assert convolution(x=x, cache=None, output_final_state=False)[1] is None


# Cache


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["text_model", "wrapper"])
@torch.no_grad()
def test_any_split_equals_one_forward(kind, split, request):
    model = request.getfixturevalue(kind)
    ids = random_ids(2, 24)
    logits, cache = feed(model, ids, SPLITS[split])
    whole = model(ids)
    torch.testing.assert_close(logits, model(ids, use_cache=False).logits, atol=1e-4, rtol=1e-4)
    assert_same_cache(cache, whole.past_key_values)
    assert cache.get_seq_length() == 24 and cache.has_previous_state


@torch.no_grad()
def test_a_long_text_equals_its_pieces(text_model):
    """Experts and convolutions take another way for many tokens than for few."""
    ids = random_ids(2, 80)
    assert 80 > modeling.FEW_TOKENS > 16
    whole = text_model(ids)
    logits, cache = feed(text_model, ids, [8] * 10)
    torch.testing.assert_close(logits, whole.logits, atol=1e-4, rtol=1e-4)
    assert_same_cache(cache, whole.past_key_values)


@pytest.mark.parametrize("split", SPLITS)
@torch.no_grad()
def test_left_padding_equals_no_padding(text_model, split):
    ids, pad = random_ids(2, 24, seed=5), 3
    mask = torch.ones_like(ids)
    mask[1, :pad] = 0
    widths = [8] + [1] * 16 if split == "one at a time" else SPLITS[split]  # padding belongs to the prefill
    logits, cache = feed(text_model, ids, widths, attention_mask=mask)
    alone = text_model(ids[1:, pad:])
    torch.testing.assert_close(logits[1:, pad:], alone.logits, atol=1e-4, rtol=1e-4)
    padded, unpadded = cache_tensors(cache), cache_tensors(alone.past_key_values)
    for name, tensor in unpadded.items():
        row = padded[name][1:]
        torch.testing.assert_close(row[:, :, pad:] if "_cache" in name else row, tensor, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_recurrent_states_are_new_float32_tensors_each_forward(text_model):
    ids = random_ids(1, 10)
    _, cache = feed(text_model, ids, [8])
    before = cache.recurrent_states[0]
    copied = before.clone()
    for start in (8, 9):
        text_model(ids[:, start : start + 1], past_key_values=cache)
    assert cache.recurrent_states[0] is not before and torch.equal(before, copied)
    assert before.dtype == torch.float32 and before.shape == (1, 2, 8, 8)


def test_cache_has_the_released_fields_and_cannot_be_cut(text_model):
    cache = text_model(random_ids(1, 3)).past_key_values
    assert type(cache).__name__ == "KimiDynamicCache" and not hasattr(cache, "crop") and not hasattr(cache, "layers")
    assert [x is None for x in cache.key_cache] == [x is not None for x in cache.recurrent_states]
    assert [x.shape for x in cache.conv_states[0]] == [(1, 16, 4)] * 3
    assert cache.key_cache[2].shape == (1, 2, 3, 12) and cache.value_cache[2].shape == (1, 2, 3, 6)
    assert text_model(random_ids(1, 3), use_cache=False).past_key_values is None
    assert not modeling.KimiDynamicCache(text_model.config).has_previous_state


def test_other_caches_and_wrong_masks_are_refused(text_model):
    ids = random_ids(1, 4)
    with pytest.raises(ValueError, match="DynamicCache.*expected a KimiDynamicCache"):
        text_model(ids, past_key_values=DynamicCache())
    cache = text_model(ids).past_key_values
    with pytest.raises(ValueError, match=r"\(1, 4\); expected \(1, 8\)"):
        text_model(ids, attention_mask=torch.ones(1, 4), past_key_values=cache)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        text_model()


# The other parts, against plain formulas


def plain_mixture(candidates, norm, proj):
    """Attention residual at one position: candidates [N, H] -> [H]."""
    scores = []
    for candidate in candidates:
        normed = candidate / torch.sqrt((candidate**2).mean() + norm.eps)
        scores.append((normed * norm.weight * proj.weight[0]).sum())
    return (torch.softmax(torch.stack(scores), 0)[:, None] * candidates).sum(0)


@torch.no_grad()
def test_attention_residuals_follow_the_hand_written_order(text_model):
    entered, attended, fed = {}, {}, {}
    hooks = []
    for i, layer in enumerate(text_model.model.layers):
        feed_forward = layer.mlp if i == 0 else layer.block_sparse_moe
        hooks += [
            layer.input_layernorm.register_forward_pre_hook(lambda m, args, i=i: entered.update({i: args[0]})),
            layer.self_attn.register_forward_hook(lambda m, args, out, i=i: attended.update({i: out})),
            feed_forward.register_forward_hook(lambda m, args, out, i=i: fed.update({i: out})),
            layer.post_attention_layernorm.register_forward_pre_hook(
                lambda m, args, i=i: entered.update({f"mlp {i}": args[0]})
            ),
        ]
    hooks.append(text_model.model.norm.register_forward_pre_hook(lambda m, args: entered.update(last=args[0])))
    ids = random_ids(1, 5)
    hidden_states = text_model(ids, output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()

    t = 4
    prefix, snapshots = text_model.model.embed_tokens(ids)[0, t], []
    for i, layer in enumerate(text_model.model.layers):
        candidates = torch.stack([*snapshots, prefix])
        mixed = plain_mixture(candidates, layer.self_attention_res_norm, layer.self_attention_res_proj)
        torch.testing.assert_close(entered[i][0, t], prefix if i == 0 else mixed)
        if i % 2 == 0:
            snapshots, prefix = [*snapshots, prefix], attended[i][0, t]
        else:
            prefix = prefix + attended[i][0, t]
        mixed = plain_mixture(torch.stack([*snapshots, prefix]), layer.mlp_res_norm, layer.mlp_res_proj)
        torch.testing.assert_close(entered[f"mlp {i}"][0, t], mixed)
        prefix = prefix + fed[i][0, t]
        if i + 1 < len(text_model.model.layers):
            torch.testing.assert_close(hidden_states[i + 1][0, t], prefix)
            assert not torch.allclose(entered[i + 1][0, t], prefix, atol=1e-2)
    mixed = plain_mixture(
        torch.stack([*snapshots, prefix]), text_model.model.output_attn_res_norm, text_model.model.output_attn_res_proj
    )
    torch.testing.assert_close(entered["last"][0, t], mixed)
    assert len(snapshots) >= 3


def test_situ_equals_its_formula():
    gate, up = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).mul(20).unbind(0)
    expected = 4 * torch.tanh(gate / 4) / (1 + torch.exp(-gate)) * 25 * torch.tanh(up / 25)
    torch.testing.assert_close(modeling.situ(gate, up, 4.0, 25.0), expected)
    half = modeling.situ(gate.bfloat16(), up.bfloat16(), 4.0, 25.0)
    torch.testing.assert_close(
        half, modeling.situ(gate.bfloat16().float(), up.bfloat16().float(), 4.0, 25.0).bfloat16()
    )


@torch.no_grad()
def test_router_chooses_by_biased_and_weighs_by_unbiased_scores(text_model):
    gate = text_model.model.layers[1].block_sparse_moe.gate
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    experts, weights = gate(x)
    biased_choices = 0
    for row in range(20):
        scores = 1 / (1 + torch.exp(-(gate.weight @ x[row])))
        chosen = sorted(range(4), key=lambda e: -(scores[e] + gate.e_score_correction_bias[e]).item())[:2]
        assert sorted(experts[row].tolist()) == sorted(chosen)
        biased_choices += sorted(chosen) != sorted(scores.topk(2).indices.tolist())
        for slot, expert in enumerate(experts[row].tolist()):
            expected = scores[expert] / (scores[chosen].sum() + 1e-20) * gate.routed_scaling_factor
            torch.testing.assert_close(weights[row, slot], expected)
    assert biased_choices > 0


@torch.no_grad()
def test_latent_mixture_of_experts_equals_a_token_by_token_loop(text_model):
    block = text_model.model.layers[1].block_sparse_moe
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0))
    experts, weights = block.gate(x[0])
    for t in range(6):
        latent = block.routed_expert_down_proj.weight @ x[0, t]
        total = torch.zeros(16)
        for expert, weight in zip(experts[t].tolist(), weights[t], strict=True):
            w1, w2, w3 = (getattr(block.experts[expert], name).weight for name in ("w1", "w2", "w3"))
            total += weight * (w2 @ modeling.situ(w1 @ latent, w3 @ latent, 4.0, 25.0))
        normed = total / torch.sqrt((total**2).mean() + 1e-5) * block.routed_expert_norm.weight
        expected = block.routed_expert_up_proj.weight @ normed + block.shared_experts(x[0, t])
        torch.testing.assert_close(block(x)[0, t], expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_gated_mla_equals_a_plain_softmax(text_model):
    attention = text_model.model.layers[2].self_attn
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    actual = attention(x, modeling.causal_mask(None, 5, 0, like=x))
    queries = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x)))[0].view(5, 2, 12)
    latent, shared = attention.kv_a_proj_with_mqa(x)[0].split([10, 4], dim=-1)
    keys_values = attention.kv_b_proj(attention.kv_a_layernorm(latent)).view(5, 2, 14)
    for t in range(5):
        heads = []
        for head in range(2):
            keys = torch.cat([keys_values[: t + 1, head, :8], shared[: t + 1]], dim=-1)
            weights = torch.softmax(keys @ queries[t, head] * 12**-0.5, dim=0)
            heads.append(weights @ keys_values[: t + 1, head, 8:])
        gated = torch.cat(heads) * torch.sigmoid(attention.g_proj.weight @ x[0, t])
        torch.testing.assert_close(actual[0, t], attention.o_proj.weight @ gated, atol=1e-6, rtol=1e-4)


@torch.no_grad()
def test_eager_and_sdpa_attention_agree(text_model):
    eager = copy.deepcopy(text_model)
    eager.set_attn_implementation("eager")
    ids = random_ids(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    expected = feed(text_model, ids, [8, 3, 1], attention_mask=mask)[0]
    actual = feed(eager, ids, [8, 3, 1], attention_mask=mask)[0]
    torch.testing.assert_close(actual[0, 4:], expected[0, 4:], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(actual[1], expected[1], atol=1e-5, rtol=1e-4)


# Classes, names, loading


def test_tensor_names_are_the_released_ones(text_model, wrapper):
    kda = r"[qkv]_proj\.weight|[qkv]_conv1d\.weight|A_log|dt_bias|(f_a|f_b|b|g|o)_proj\.weight|o_norm\.weight"
    mla = r"(q_a|q_b|kv_b|g|o)_proj\.weight|kv_a_proj_with_mqa\.weight|(q|kv)_a_layernorm\.weight"
    moe = (
        r"gate\.(weight|e_score_correction_bias)|experts\.\d+\.w[123]\.weight|routed_expert_(down|up)_proj\.weight"
        r"|routed_expert_norm\.weight|shared_experts\.(gate|up|down)_proj\.weight"
    )
    layer = (
        rf"self_attn\.({kda}|{mla})|block_sparse_moe\.({moe})|mlp\.(gate|up|down)_proj\.weight"
        r"|(input|post_attention)_layernorm\.weight|(self_attention|mlp)_res_(norm|proj)\.weight"
    )
    top = r"model\.(embed_tokens|norm|output_attn_res_(norm|proj))\.weight|lm_head\.weight"
    names = list(text_model.state_dict())
    assert [name for name in names if not re.fullmatch(rf"{top}|model\.layers\.\d+\.({layer})", name)] == []
    own = {name for name in wrapper.state_dict() if not name.startswith(("vision_tower.", "mm_projector."))}
    assert own == {f"language_model.{name}" for name in names}
    attention = text_model.model.layers[0].self_attn
    assert attention.A_log.shape == (1, 1, 2, 1) and attention.dt_bias.shape == (16,)
    assert attention.q_conv1d.weight.shape == (16, 1, 4)
    assert attention.gate_lower_bound == -5.0 and attention.head_dim == attention.head_k_dim == 8
    assert "model.layers.0.mlp.gate_proj.weight" in names and text_model._is_stateful


@torch.no_grad()
def test_text_class_survives_saving_and_bf16_keeps_its_float32_parameters(text_model, tmp_path):
    text_model.save_pretrained(tmp_path)
    again = modeling.KimiLinearForCausalLM.from_pretrained(tmp_path)
    ids = random_ids(1, 9)
    assert torch.equal(again(ids).logits, text_model(ids).logits)
    half = modeling.KimiLinearForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {name.rsplit(".", 1)[1] for name, p in half.named_parameters() if p.dtype == torch.float32}
    assert kept == {"A_log", "dt_bias", "e_score_correction_bias"}
    logits, cache = feed(half, ids, [4, 4, 1])
    assert logits.dtype == torch.bfloat16 and cache.recurrent_states[0].dtype == torch.float32
    torch.testing.assert_close(logits.float(), text_model(ids).logits, atol=0.3, rtol=0.1)


@torch.no_grad()
def test_text_class_generates_by_itself(text_model):
    ids = random_ids(1, 6)
    generated = text_model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
    for _ in range(10):
        ids = torch.cat([ids, text_model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generated, ids)


@torch.no_grad()
def test_logits_cover_every_position_and_return_dict_can_be_off(text_model, wrapper):
    ids = random_ids(1, 6)
    assert text_model(ids, logits_to_keep=1).logits.shape == (1, 6, 96)
    for model in (text_model, wrapper):
        assert torch.equal(model(ids, return_dict=False)[0], model(ids).logits)
        assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)
    for name in ("logits_to_keep", "cache_position", "generation_mode"):
        with pytest.raises(TypeError, match=name):
            wrapper(ids, **{name: 1})


@torch.no_grad()
def test_images_expand_inside_the_wrapper(wrapper):
    generator = torch.Generator().manual_seed(0)
    grid = torch.tensor([[1, 2, 4], [1, 2, 2]])  # 2 positions and 1 position after 2 x 2 merging
    pixels = torch.randn(12, 3, 4, 4, generator=generator)
    ids = random_ids(2, 5)
    ids[0, 2] = ids[1, 4] = 90
    outputs = wrapper(ids, pixel_values=pixels, grid_thws=grid, attention_mask=torch.ones_like(ids))
    assert outputs.logits.shape[1] == 6 and outputs.past_key_values.get_seq_length() == 6

    weight, embed = wrapper.vision_tower.patch_embed.weight, wrapper.get_input_embeddings()
    patches = torch.einsum("pcij,dcij->pd", pixels, weight)
    first = [patches[[0, 1, 4, 5]].flatten(), patches[[2, 3, 6, 7]].flatten()]
    spliced = torch.cat([embed(ids[0, :2]), wrapper.mm_projector(torch.stack(first)), embed(ids[0, 3:])])
    alone = wrapper.language_model(inputs_embeds=spliced[None])
    torch.testing.assert_close(outputs.logits[:1], alone.logits, atol=1e-4, rtol=1e-4)
    second = torch.cat([embed(ids[1, :4]), wrapper.mm_projector(patches[8:].flatten()[None])])
    alone = wrapper.language_model(inputs_embeds=second[None])
    torch.testing.assert_close(outputs.logits[1:, 1:], alone.logits, atol=1e-4, rtol=1e-4)

    with pytest.raises(ValueError, match="2 media placeholders but grid_thws describes 1 images"):
        wrapper(ids, pixel_values=pixels[:8], grid_thws=grid[:1])
    with pytest.raises(ValueError, match="first forward only"):
        wrapper(ids, pixel_values=pixels, grid_thws=grid, past_key_values=outputs.past_key_values)


def test_configurations_check_the_layer_lists_and_the_gate():
    linear = small_config().linear_attn_config
    with pytest.raises(ValueError, match="every 1-based layer from 1 to 7 exactly once"):
        configuration.KimiLinearConfig(num_hidden_layers=7, linear_attn_config={**linear, "kda_layers": [1, 2, 4]})
    with pytest.raises(ValueError, match="gate_lower_bound.*is -9.0"):
        configuration.KimiLinearConfig(num_hidden_layers=7, linear_attn_config={**linear, "gate_lower_bound": -9.0})


@torch.no_grad()
def test_shipped_folder_loads_and_writes_python(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
    assert type(model).__name__ == "KimiK3ForConditionalGeneration" and model.dtype == torch.float32
    assert (FOLDER / "model.safetensors").stat().st_size < 16_000_000
    ids = tokenizer.convert_tokens_to_ids(["<|bos|>", "<|eos|>", "<|media_pad|>", "<|mask|>", "<|pad|>"])
    config, text = model.config, model.config.text_config
    assert ids[:2] == [text.bos_token_id, text.eos_token_id] and ids[4] == text.pad_token_id
    assert ids[2:4] == [config.media_placeholder_token_id, config.mask_token_id]
    assert len(tokenizer) == 2040 and text.vocab_size == 2048

    text = 'def f(x):\n    """Ünïcode\tand tabs."""\n    return x + 1\n'
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    prompt = tokenizer("class Foo(object):\n    def __init__(self", return_tensors="pt")
    ids = prompt.input_ids
    outputs = model(ids)
    for _ in range(24):
        token = outputs.logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, token], dim=1)
        outputs = model(token, past_key_values=outputs.past_key_values)
    written = ids[0, prompt.input_ids.shape[1] :]
    assert "self." in tokenizer.decode(written) and len(written.unique()) > 5
    assert torch.equal(model.generate(**prompt, max_new_tokens=24, eos_token_id=None), ids)
    with pytest.raises(ValueError, match="generate came with pixel_values"):
        model.generate(**prompt, pixel_values=torch.zeros(4, 3, 14, 14), max_new_tokens=1)
