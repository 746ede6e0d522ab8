"""The draft model: published tensors, agreement with the trainer's model and a slow formula, cache, loading, saving."""

import copy
import json
import math
import shutil

import pytest
import torch
from conftest import MASK_TOKEN_ID, ROOT, make_draft, make_target
from dspark.configuration_dspark import DSparkConfig
from dspark.modeling_dspark import DSparkDraftModel
from dspark.target_kimi_k3 import VerifiableTarget
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

HEADS = ["vanilla", "gated", "rnn"]
LAST_POSITION = 1048575
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536}
SMALL = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "block_size": 7,
    "num_target_layers": 9,
}
SMALL_NESTED = {
    "target_layer_ids": [1, 4, 8],
    "mask_token_id": 39,
    "markov_rank": 12,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def small_config(nested=None, **changes):
    fields = {**SMALL, "rope_theta": 10000.0, "rope_scaling": YARN, **changes}
    return DSparkConfig(**fields, dflash_config={**SMALL_NESTED, **(nested or {})})


def small_draft(nested=None, attention="sdpa", **changes):
    """A draft with every weight random, norms and biases included, so that none of them can be left out unnoticed."""
    draft = DSparkDraftModel._from_config(small_config(nested, **changes), attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.25, generator=generator)
    return draft


class Lender(VerifiableTarget):
    """A target reduced to what a draft borrows. It records the ids it is asked to embed."""

    def __init__(self, vocab_size=40, hidden_size=48):
        generator = torch.Generator().manual_seed(4)
        self.table = torch.randn(vocab_size, hidden_size, generator=generator)
        self.projection = torch.randn(vocab_size, hidden_size, generator=generator) / 4
        self.embedded = []

    def embed(self, token_ids):
        self.embedded.append(token_ids)
        return self.table[token_ids]

    def head(self, hidden):
        return hidden.float() @ self.projection.T


def features_of(batch, length, seed=5):
    return torch.randn(batch, length, 3 * 48, generator=torch.Generator().manual_seed(seed))


def written(draft, features, pieces=None, start=0):
    """A cache with the context `features`, whose first position is `start`, written in pieces of the given lengths."""
    cache = draft.new_cache(features.shape[0])
    cache.next_position += start
    at = 0
    for length in pieces or [features.shape[1]]:
        positions = start + torch.arange(at, at + length).expand(features.shape[0], -1)
        draft.write_context(features[:, at : at + length], positions, cache)
        at += length
    assert at == cache.length == features.shape[1]
    return cache


# ---- the published tensors


def published_shapes():
    shapes = {"fc.weight": [7168, 35840], "hidden_norm.weight": [7168], "norm.weight": [7168]}
    for layer in range(5):
        of_layer = {
            "input_layernorm": [7168],
            "post_attention_layernorm": [7168],
            "self_attn.q_proj": [4096, 7168],
            "self_attn.k_proj": [1024, 7168],
            "self_attn.v_proj": [1024, 7168],
            "self_attn.o_proj": [7168, 4096],
            "self_attn.q_norm": [64],
            "self_attn.k_norm": [64],
            "mlp.gate_proj": [14336, 7168],
            "mlp.up_proj": [14336, 7168],
            "mlp.down_proj": [7168, 14336],
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    shapes |= {"markov_head.markov_w1.weight": [163840, 256], "markov_head.markov_w2.weight": [163840, 256]}
    return shapes | {"confidence_head.proj.weight": [1, 7424], "confidence_head.proj.bias": [1]}


def safetensors_size(shapes, dtype, bytes_each):
    """Bytes of a safetensors file: 8 for the header's length, the JSON header padded with spaces to 8 bytes, the data.

    Tensors of one dtype are laid out in the order of their names.
    """
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(shapes):
        end = at + math.prod(shapes[name]) * bytes_each
        header[name] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": [at, end]}
        at = end
    length = len(json.dumps(header, separators=(",", ":")))
    return 8 + (length + 7) // 8 * 8 + at


def test_shipped_configuration_gives_the_published_tensors():
    with torch.device("meta"):
        draft = DSparkDraftModel(DSparkConfig.from_pretrained(ROOT))
    shapes = {name: list(tensor.shape) for name, tensor in draft.state_dict().items()}
    assert shapes == published_shapes() and len(shapes) == 62
    assert sum(parameter.numel() for parameter in draft.parameters()) == 2_249_289_601
    assert safetensors_size(shapes, "BF16", 2) == 4_498_585_858


def test_file_size_formula_holds_for_a_real_file(tmp_path):
    draft = small_draft().to(torch.bfloat16)
    draft.save_pretrained(tmp_path)
    shapes = {name: tensor.shape for name, tensor in draft.state_dict().items()}
    assert (tmp_path / "model.safetensors").stat().st_size == safetensors_size(shapes, "BF16", 2)


def test_fresh_weights_follow_the_initializer_range():
    draft = DSparkDraftModel(small_config({"markov_head_type": "gated"}, initializer_range=0.1))
    for name, weight in draft.state_dict().items():
        if name.endswith("norm.weight"):
            assert torch.equal(weight, torch.ones_like(weight)), name
        elif name.endswith("bias"):
            assert torch.equal(weight, torch.zeros_like(weight)), name
        elif weight.numel() > 1000:
            assert weight.std().item() == pytest.approx(0.1, rel=0.1), name


# ---- agreement with the trainer's model


def oracle_for(draft, **changes):
    """The trainer's model with the same weights, on a plain Qwen3 configuration: `SMALL` with `changes`."""
    oracle_class = pytest.importorskip(
        "specforge.modeling.draft.dspark", reason="needs the test extra: pip install --no-deps specforge==0.2.0"
    ).DSparkDraftModel
    fields = {**SMALL, **changes}
    fields = {name: value for name, value in fields.items() if name not in ("block_size", "num_target_layers")}
    config = Qwen3Config(**fields, rope_theta=1e4, rope_scaling=dict(YARN))
    config.block_size, config.num_target_layers = draft.config.block_size, draft.config.num_target_layers
    config.dflash_config = dict(draft.config.dflash_config)
    config._attn_implementation = "eager"
    oracle = oracle_class(config).eval()
    oracle.load_state_dict(draft.state_dict())
    return oracle


def close(ours, theirs, tolerance=1e-5):
    return torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("start", [0, 70000, LAST_POSITION + 1 - 11 - 7])
@pytest.mark.parametrize("pieces", [[11], [1] * 11, [4, 1, 6]])
def test_backbone_agrees_with_the_trainer(start, pieces):
    draft, lender = small_draft(), Lender()
    features, anchors = features_of(2, 11), torch.tensor([5, 17])
    block = draft.draft_block(anchors, written(draft, features, pieces, start), lender)
    masks = torch.full((2, 6), 39)
    hidden = oracle_for(draft)(
        position_ids=torch.arange(start, start + 18).expand(2, -1),
        noise_embedding=lender.table[torch.cat([anchors[:, None], masks], dim=1)],
        target_hidden=features,
    )
    assert close(block.hidden, hidden)


@torch.no_grad()
def test_a_context_of_a_million_tokens_agrees_with_the_trainer():
    """All of it: the last block ends at the last position there is."""
    narrow = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    draft = small_draft({"target_layer_ids": [1], "markov_rank": 4}, **narrow)
    lender, length = Lender(hidden_size=16), LAST_POSITION + 1 - 7
    features = torch.randn(1, length, 16, generator=torch.Generator().manual_seed(5))
    chunks = [16384] * (length // 16384) + [length % 16384]
    block = draft.draft_block(torch.tensor([5]), written(draft, features, chunks), lender)
    hidden = oracle_for(draft, **narrow)(
        position_ids=torch.arange(length + 7)[None],
        noise_embedding=lender.table[torch.tensor([[5] + [39] * 6])],
        target_hidden=features,
    )
    assert close(block.hidden, hidden)
    # The whole context counts: without its older half the block is another one.
    half = written(draft, features[:, length // 2 :], start=length // 2)
    assert not close(draft.draft_block(torch.tensor([5]), half, lender).hidden, hidden, 1e-3)


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
def test_heads_agree_with_the_trainer(head):
    draft, lender = small_draft({"markov_head_type": head}), Lender()
    oracle = oracle_for(draft)
    anchors = torch.arange(8)
    block = draft.draft_block(anchors, written(draft, features_of(8, 5)), lender)
    base_logits = lender.head(block.hidden)

    tokens, logits = oracle.markov_head.sample_block_tokens(
        base_logits, first_prev_token_ids=anchors, hidden_states=block.hidden
    )
    assert torch.equal(block.tokens, tokens) and close(block.logits, logits)
    assert not torch.equal(tokens, base_logits.argmax(dim=-1)), "the bias must matter for this test to say anything"

    previous = torch.cat([anchors[:, None], tokens[:, :-1]], dim=1)
    assert close(block.confidence, oracle.predict_confidence(block.hidden, prev_token_ids=previous))


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
def test_markov_steps_agree_with_the_trainer_on_given_tokens(head):
    draft = small_draft({"markov_head_type": head})
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(4, 7, 48, generator=generator)
    previous = torch.randint(40, (4, 7), generator=generator)
    state, biases = None, []
    for row in range(7):
        bias, state = draft.markov_head.step(previous[:, row], hidden[:, row], state)
        biases.append(bias)
    theirs = oracle_for(draft).markov_head.apply_block_logits(
        torch.zeros(4, 7, 40), token_ids=previous, hidden_states=hidden
    )
    assert close(torch.stack(biases, dim=1), theirs)


@torch.no_grad()
def test_confidence_head_without_markov_agrees_with_the_trainer():
    draft = small_draft({"markov_rank": 0, "confidence_head_with_markov": False})
    block = draft.draft_block(torch.tensor([3]), written(draft, features_of(1, 5)), Lender())
    assert close(block.confidence, oracle_for(draft).predict_confidence(block.hidden))


# ---- agreement with a slow formula


def slow_block(draft, features, anchor, lender):
    """One block for one row, written out in float64 with a loop over heads: hidden rows, tokens, logits, confidence."""
    weights = {name: tensor.double() for name, tensor in draft.state_dict().items()}

    def norm(x, name):
        return x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + 1e-5) * weights[f"{name}.weight"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T

    def turn(x, positions):
        angles = torch.outer(positions.double(), yarn_frequencies(64, 1e4, 16, 65536))
        cos, sin = ((0.1 * math.log(16) + 1) * f(angles) for f in (torch.cos, torch.sin))
        first, second = x[:, :32], x[:, 32:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    context = norm(linear(features.double(), "fc"), "hidden_norm")
    past = torch.arange(len(features))
    here = len(features) + torch.arange(7)
    h = lender.table[torch.tensor([anchor] + [39] * 6)].double()
    for layer in range(3):
        name = f"layers.{layer}."
        x = norm(h, name + "input_layernorm")
        reads, at = torch.cat([context, x]), torch.cat([past, here])
        q, k, v = (linear(y, f"{name}self_attn.{p}_proj") for y, p in ((x, "q"), (reads, "k"), (reads, "v")))
        mixed = []
        for head in range(6):
            own, shared = slice(64 * head, 64 * head + 64), slice(64 * (head // 3), 64 * (head // 3) + 64)
            query = turn(norm(q[:, own], name + "self_attn.q_norm"), here)
            key = turn(norm(k[:, shared], name + "self_attn.k_norm"), at)
            mixed.append(torch.softmax(query @ key.T / 8, dim=-1) @ v[:, shared])
        h = h + linear(torch.cat(mixed, dim=-1), name + "self_attn.o_proj")
        x = norm(h, name + "post_attention_layernorm")
        gate = linear(x, name + "mlp.gate_proj")
        h = h + linear(gate * torch.sigmoid(gate) * linear(x, name + "mlp.up_proj"), name + "mlp.down_proj")
    h = norm(h, "norm")

    tokens, logits, confidence, previous = [], [], [], anchor
    for row in h:
        embedded = weights["markov_head.markov_w1.weight"][previous]
        logits.append(lender.projection.double() @ row + weights["markov_head.markov_w2.weight"] @ embedded)
        confidence.append(weights["confidence_head.proj.weight"][0] @ torch.cat([row, embedded]))
        previous = int(logits[-1].argmax())
        tokens.append(previous)
    return h, torch.tensor(tokens), torch.stack(logits), torch.stack(confidence) + weights["confidence_head.proj.bias"]


def yarn_frequencies(width, theta, factor, original):
    """Inverse frequencies of YaRN (Peng et al., arXiv 2309.00071, section 3.2): interpolated where a channel turns less
    than once over the original length, left alone where it turns more than 32 times, blended in between."""
    plain = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)

    def channel(turns):
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = math.floor(channel(32)), math.ceil(channel(1))
    blend = ((torch.arange(width // 2) - low) / (high - low)).clamp(0, 1)
    return plain * (1 - blend) + plain / factor * blend


def test_block_is_the_written_out_formula():
    draft, lender = small_draft(), Lender()
    features = features_of(1, 9)
    block = draft.draft_block(torch.tensor([21]), written(draft, features), lender)
    hidden, tokens, logits, confidence = slow_block(draft, features[0], 21, lender)
    assert close(block.hidden[0].double(), hidden)
    assert close(block.logits[0].double(), logits)
    assert close(block.confidence[0].double(), confidence)
    assert torch.equal(block.tokens[0], tokens)


def test_yarn_table_is_transformers_own_and_the_papers():
    draft = small_draft()
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](draft.config, torch.device("cpu"))
    assert torch.equal(draft.rotary_emb.inv_freq, expected) and draft.rotary_emb.attention_scaling == factor
    assert torch.allclose(expected.double(), yarn_frequencies(64, 1e4, 16, 65536), rtol=1e-6)
    assert factor == pytest.approx(0.1 * math.log(16) + 1)


# ---- slots and drawing


def test_seven_rows_give_seven_drafts_in_order():
    class RowNumbers(Lender):
        def head(self, hidden):
            return nn.functional.one_hot(torch.arange(10, 10 + hidden.shape[1]), 40)[None].float()

    draft, lender = small_draft({"markov_rank": 0, "confidence_head_with_markov": False}), RowNumbers()
    block = draft.draft_block(torch.tensor([21]), written(draft, features_of(1, 4)), lender)
    assert block.tokens.tolist() == [[10, 11, 12, 13, 14, 15, 16]]
    assert lender.embedded[0].tolist() == [[21, 39, 39, 39, 39, 39, 39]]


def test_only_the_anchor_tells_two_blocks_apart():
    draft, lender = small_draft(), Lender()
    cache = written(draft, features_of(1, 4))
    first, second = (draft.draft_block(torch.tensor([anchor]), cache, lender) for anchor in (1, 2))
    assert not close(first.logits, second.logits)


def test_markov_rank_zero_and_no_confidence_head():
    draft, lender = small_draft({"markov_rank": 0, "enable_confidence_head": False}), Lender()
    block = draft.draft_block(torch.tensor([3]), written(draft, features_of(1, 4)), lender)
    assert block.confidence is None and draft.markov_head is None
    assert torch.equal(block.logits, lender.head(block.hidden))


def test_scores_are_made_of_the_tokens_drafted_so_far():
    draft, seen = small_draft(), []

    def forbid_the_best(drafted, logits):
        seen.append(([tokens.tolist() for tokens in drafted], logits))
        return logits.scatter(1, logits.argmax(dim=-1, keepdim=True), -torch.inf)

    block = draft.draft_block(torch.tensor([21]), written(draft, features_of(1, 2)), Lender(), forbid_the_best)
    tokens = block.tokens[0].tolist()
    assert [drafted for drafted, _ in seen] == [[[token] for token in tokens[:row]] for row in range(7)]
    given = torch.stack([logits for _, logits in seen], dim=1)
    assert torch.equal(block.logits, given)
    assert torch.equal(block.scores, given.scatter(2, given.argmax(dim=-1, keepdim=True), -torch.inf))
    assert torch.equal(block.tokens, block.scores.argmax(dim=-1)) and block.scores.dtype == torch.float32


def test_sampled_tokens_follow_the_softmax_of_the_scores():
    draft, lender = small_draft(), Lender()
    rows = 4000
    cache = written(draft, features_of(1, 2).expand(rows, -1, -1))
    anchors = torch.full((rows,), 21)
    torch.manual_seed(8)
    block = draft.draft_block(anchors, cache, lender, lambda _, logits: logits / 2, do_sample=True)
    expected = block.scores[0, 0].softmax(dim=-1) * rows
    counts = torch.bincount(block.tokens[:, 0], minlength=40)
    common = expected >= 5
    chi_square = ((counts - expected) ** 2 / expected)[common].sum().item()
    assert common.sum() >= 8
    # The draws are seeded. Of 10,000 seeds, about one takes a true sampler five standard deviations above its mean.
    assert chi_square < common.sum() + 5 * math.sqrt(2 * common.sum())
    # Every later row starts from the token drawn for its own row of the batch.
    previous = torch.cat([anchors[:, None], block.tokens[:, :-1]], dim=1)
    assert close(block.logits, lender.head(block.hidden) + draft.markov_head.step(previous, block.hidden, None)[0])


def test_the_seed_decides_the_block():
    draft, lender = small_draft(), Lender()
    cache = written(draft, features_of(1, 2))
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(draft.draft_block(torch.tensor([3]), cache, lender, do_sample=True))
    assert torch.equal(draws[0].tokens, draws[1].tokens) and not torch.equal(draws[0].tokens, draws[2].tokens)


# ---- the cache


def test_many_rounds_copy_the_cache_only_when_it_grows():
    draft, lender = small_draft(), Lender()
    features = features_of(1, 300)
    cache, places = draft.new_cache(), []
    for at in range(300):
        draft.write_context(features[:, at : at + 1], torch.tensor([[at]]), cache)
        before = [tensor[:, :, : cache.length].clone() for tensor in cache.keys + cache.values]
        draft.draft_block(torch.tensor([3]), cache, lender)
        assert cache.length == at + 1 and cache.next_position.tolist() == [at + 1]
        assert all(torch.equal(old, new[:, :, : at + 1]) for old, new in zip(before, cache.keys + cache.values))
        if not places or places[-1] != cache.keys[1].data_ptr():
            places.append(cache.keys[1].data_ptr())
    assert len(places) <= 12  # 8 slots at first, half more at each growth, for 307
    assert cache.capacity < 1.5 * 307 + 1


def test_attention_reads_the_buffers_themselves():
    draft = small_draft()
    cache = written(draft, features_of(1, 6))
    cache.reserve(7)
    keys, values = cache.place(1, *(torch.zeros(1, 2, 7, 64) for _ in range(2)))
    assert keys.data_ptr() == cache.keys[1].data_ptr() and values.data_ptr() == cache.values[1].data_ptr()
    assert keys.shape == (1, 2, 13, 64)


def test_blocks_leave_nothing_behind():
    draft, lender = small_draft(), Lender()
    features = features_of(1, 12)
    cache = written(draft, features[:, :5])
    for anchor in (1, 2, 3):
        draft.draft_block(torch.tensor([anchor]), cache, lender)
    draft.write_context(features[:, 5:], torch.arange(5, 12)[None], cache)
    after = draft.draft_block(torch.tensor([9]), cache, lender)
    fresh = draft.draft_block(torch.tensor([9]), written(draft, features), lender)
    assert close(after.logits, fresh.logits, 1e-6)


def test_batch_rows_do_not_touch_each_other():
    draft, lender = small_draft(), Lender()
    features, anchors = features_of(2, 6), torch.tensor([5, 17])
    both = draft.draft_block(anchors, written(draft, features), lender)
    for row in range(2):
        alone = draft.draft_block(anchors[row : row + 1], written(draft, features[row : row + 1]), lender)
        assert close(both.logits[row], alone.logits[0]) and torch.equal(both.tokens[row], alone.tokens[0])
        assert close(both.confidence[row], alone.confidence[0])


# ---- attention, dtypes, borrowed modules


@pytest.mark.parametrize("key_value_heads, mode", [(2, "gqa"), (6, "mha")])
def test_eager_equals_sdpa(key_value_heads, mode):
    blocks = []
    for attention in ("eager", "sdpa"):
        draft = small_draft({"attention_mode": mode}, attention, num_key_value_heads=key_value_heads)
        assert draft.config._attn_implementation == attention
        blocks.append(draft.draft_block(torch.tensor([5]), written(draft, features_of(1, 30)), Lender()))
    assert close(blocks[0].hidden, blocks[1].hidden)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bfloat16_stays_close(attention):
    # The default initialisation, as a trained draft's numbers are of ordinary size; bfloat16 keeps 8 bits.
    exact = DSparkDraftModel._from_config(small_config(), attn_implementation=attention).eval()
    rough = copy.deepcopy(exact).to(torch.bfloat16)
    for start in (0, LAST_POSITION + 1 - 30 - 7):
        blocks = [
            draft.draft_block(torch.tensor([5]), written(draft, features_of(1, 30), start=start), Lender())
            for draft in (exact, rough)
        ]
        assert blocks[1].hidden.dtype == torch.bfloat16 and blocks[1].logits.dtype == torch.float32
        assert (blocks[0].hidden - blocks[1].hidden).abs().max() < 0.05


class OnlyCallable(nn.Module):
    """A module that works when called and has no weight to read, as an offloaded or quantised one."""

    def __init__(self, inner):
        super().__init__()
        self.call = [inner]  # in a list: not a child, no parameter

    def forward(self, inputs):
        return self.call[0](inputs)


def test_embedding_and_head_are_borrowed_as_calls():
    target = make_target("qwen3")
    draft = make_draft(target)
    features = torch.randn(1, 4, draft.fc.in_features)
    plain = draft.draft_block(torch.tensor([3]), written(draft, features), target)
    target.model.embed_tokens = OnlyCallable(target.model.embed_tokens)
    target.lm_head = OnlyCallable(target.lm_head)
    called = draft.draft_block(torch.tensor([3]), written(draft, features), target)
    assert torch.equal(plain.logits, called.logits) and MASK_TOKEN_ID == draft.config.mask_token_id


# ---- loading and saving


@pytest.mark.parametrize("head", HEADS)
def test_saved_file_holds_the_draft_and_nothing_else(head, tmp_path):
    draft = small_draft({"markov_head_type": head})
    draft.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    extra = {"gated": {"gate_proj.weight", "gate_proj.bias"}, "rnn": {"joint_proj.weight", "joint_proj.bias"}}
    names = {name for name in published_shapes() if not name.startswith(("layers.3.", "layers.4."))}
    assert saved.keys() == names | {f"markov_head.{name}" for name in extra.get(head, ())}
    loaded = DSparkDraftModel.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.state_dict().items())
    lender, anchor = Lender(), torch.tensor([3])
    ours, theirs = (model.draft_block(anchor, written(model, features_of(1, 4)), lender) for model in (draft, loaded))
    assert close(ours.logits, theirs.logits)


def test_saved_folder_carries_every_root_module(tmp_path):
    small_draft().save_pretrained(tmp_path)
    modules = {path.stem for path in ROOT.glob("*.py")}
    assert {path.stem for path in tmp_path.glob("*.py")} == modules
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "configuration_dspark.DSparkConfig",
        "AutoModel": "modeling_dspark.DSparkDraftModel",
    }


def test_auto_classes_leave_the_drafts_own_generate(tmp_path):
    small_draft().save_pretrained(tmp_path)
    shutil.copytree(ROOT / "custom_generate", tmp_path / "custom_generate")
    loaded = add_generation_mixin_to_remote_model(DSparkDraftModel).from_pretrained(tmp_path, trust_remote_code=True)
    assert loaded.generate.__func__ is DSparkDraftModel.generate
    loaded.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again" / "generation_config.json").exists()


def rewrite(folder, change):
    """Apply `change` to the tensors of the checkpoint in `folder`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def to_old_names(tensors):
    for name in [name for name in tensors if "_head." in name]:
        tensors["logit_head." + name] = tensors.pop(name)


def test_old_head_names_are_accepted_and_saved_under_the_new(tmp_path):
    draft = small_draft()
    draft.save_pretrained(tmp_path / "old")
    rewrite(tmp_path / "old", to_old_names)
    loaded = DSparkDraftModel.from_pretrained(tmp_path / "old")
    loaded.save_pretrained(tmp_path / "new")
    old_state = dict(draft.state_dict())
    to_old_names(old_state)
    filled = DSparkDraftModel(draft.config)
    filled.load_state_dict(old_state)
    for state in (loaded.state_dict(), filled.state_dict(), load_file(tmp_path / "new" / "model.safetensors")):
        assert state.keys() == draft.state_dict().keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in draft.state_dict().items())


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, *shape):
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def rename(tensors):
    tensors["layers.0.self_attn.k_norm_weight"] = tensors.pop("layers.0.self_attn.k_norm.weight")


@pytest.mark.parametrize(
    "change, named",
    [
        (drop("fc.weight"), ["missing: fc.weight"]),
        (drop("markov_head.markov_w2.weight"), ["missing: markov_head.markov_w2.weight"]),
        (put("tap_norms.0.weight", 48), ["unexpected: tap_norms.0.weight"]),
        (put("embed_tokens.weight", 40, 48), ["unexpected: embed_tokens.weight"]),
        (rename, ["missing: layers.0.self_attn.k_norm.weight", "unexpected: layers.0.self_attn.k_norm_weight"]),
        (put("norm.weight", 47), ["of another shape: norm.weight (expected [48])"]),
    ],
    ids=["missing", "missing head", "unexpected", "embedding", "renamed", "shape"],
)
def test_checkpoint_that_does_not_fit_is_refused_by_name(change, named, tmp_path):
    small_draft().save_pretrained(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ValueError) as refusal:
        DSparkDraftModel.from_pretrained(tmp_path)
    assert all(text in str(refusal.value) for text in named)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, "auto"])
@pytest.mark.parametrize("device_map", [None, "cpu", "auto"])
def test_dtype_and_rope_table_after_loading(dtype, device_map, tmp_path):
    draft = small_draft().to(torch.bfloat16)
    draft.save_pretrained(tmp_path)
    loaded = DSparkDraftModel.from_pretrained(tmp_path, dtype=dtype, device_map=device_map)
    assert loaded.dtype == (torch.bfloat16 if dtype == "auto" else dtype)
    assert_table_is_exact(loaded)
    assert_table_is_exact(draft)  # after a cast


def assert_table_is_exact(draft):
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](small_config(), torch.device("cpu"))
    assert draft.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(draft.rotary_emb.inv_freq, expected)


def test_rope_table_without_a_checkpoint():
    with torch.device("meta"):
        emptied = DSparkDraftModel(small_config())
    emptied.to_empty(device="cpu")
    for draft in (
        emptied,
        DSparkDraftModel._from_config(small_config(), dtype=torch.bfloat16),
        DSparkDraftModel(small_config()).half().float(),
    ):
        assert_table_is_exact(draft)


def test_nothing_is_tied_and_no_embedding_is_owned():
    draft = small_draft()
    assert not draft.config.tie_word_embeddings and not getattr(draft, "_tied_weights_keys", None)
    assert draft.get_input_embeddings() is None and draft.get_output_embeddings() is None
    draft.tie_weights()
    with pytest.raises(ValueError, match="40.*cannot be resized"):
        draft.resize_token_embeddings(50)


# ---- bad input


@pytest.mark.parametrize(
    "features, positions, message",
    [
        (torch.zeros(1, 4, 143), torch.arange(4)[None], r"\[1, 4, 143\], expected \[batch, positions, 144\]"),
        (torch.zeros(4, 144), torch.arange(4)[None], r"\[4, 144\], expected"),
        (torch.zeros(1, 0, 144), torch.arange(0)[None], r"\[1, 0, 144\], expected .* at least one position"),
        (torch.zeros(1, 4, 144).long(), torch.arange(4)[None], "torch.int64, expected a float dtype"),
        (torch.zeros(2, 4, 144), torch.arange(4).expand(2, -1), r"batch and positions \[2, 4\].*holds batch 1"),
        (torch.zeros(1, 4, 144), torch.arange(5)[None], r"position_ids have shape \[1, 5\]"),
        (torch.zeros(1, 4, 144), torch.arange(1, 5)[None], r"run from \[1\] to \[4\].*goes on at \[0\]"),
        (torch.zeros(1, 4, 144), torch.tensor([[0, 1, 3, 3]]), r"run from \[0\] to \[3\]"),
    ],
)
def test_bad_context_is_refused_and_nothing_is_written(features, positions, message):
    draft = small_draft()
    cache = draft.new_cache()
    with pytest.raises(ValueError, match=message):
        draft.write_context(features, positions, cache)
    assert cache.length == cache.capacity == 0


@pytest.mark.parametrize(
    "anchors, message",
    [
        (torch.tensor([1, 2]), r"shape \[2\], expected int64 of shape \[1\]"),
        (torch.tensor([[1]]), r"shape \[1, 1\], expected int64 of shape \[1\]"),
        (torch.tensor([1.0]), "torch.float32 .* expected int64"),
    ],
)
def test_bad_block_input_is_refused_before_any_forward(anchors, message):
    draft, lender = small_draft(), Lender()
    cache = written(draft, features_of(1, 4))
    with pytest.raises(ValueError, match=message):
        draft.draft_block(anchors, cache, lender)
    assert not lender.embedded


@pytest.mark.parametrize("part", ["", "layers.1"])
def test_draft_that_is_not_all_on_one_device_is_refused(part):
    draft = small_draft()
    draft.get_submodule(part).to("meta")
    with pytest.raises(ValueError, match="meta, expected one device"):
        draft.new_cache()


@pytest.mark.parametrize(
    "lender, message",
    [
        (Lender(vocab_size=41), "output head returns vectors of 41, the draft's `vocab_size` is 40"),
        (Lender(hidden_size=49), "input embedding returns vectors of 49, the draft's `hidden_size` is 48"),
    ],
)
def test_target_of_another_size_is_refused(lender, message):
    draft = small_draft()
    with pytest.raises(ValueError, match=message):
        draft.draft_block(torch.tensor([1]), written(draft, features_of(1, 4)), lender)
