"""Distillation: the objective against a loop over rows and against the trainer's own, blocks that do not see each
other, gradients, memory, and the trace of the target that all of it feeds on."""

import math
import weakref
from types import SimpleNamespace

import distillation
import pytest
import torch
from conftest import MASK_TOKEN_ID, make_draft, make_target, random_ids
from distillation import Distillation, block_terms, row_weights, sample_anchors, supervised_rows
from dspark.target_kimi_k3 import VerifiableTarget
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

K = 7
HEADS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "none": {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
}
every_head = pytest.mark.parametrize("head", HEADS)

# Two sequences of 20 tokens. The first loss mask has a hole, the second ends before its sequence does.
LENGTH = 20
SUPERVISED = [[4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17, 18, 19], [9, 10, 11, 12, 13, 14, 15]]
# Out of order; 10 sits before the hole and has nothing to learn, 18 has one row, and 9 fills the second sequence up.
ANCHORS = torch.tensor([[14, 3, 8, 10, 18], [8, 14, 12, 9, 9]])
VALID = torch.tensor([[True] * 5, [True, True, True, False, False]])


def loss_mask():
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    for row, positions in enumerate(SUPERVISED):
        mask[row, positions] = True
    return mask


def slow_rows():
    """The rows that count, `[2, 5, 7]`: of each block, up to the first whose token is missing or not to be learned."""
    rows = torch.zeros(2, 5, K, dtype=torch.bool)
    for b in range(2):
        for a in range(5):
            for k in range(K):
                if not VALID[b, a] or int(ANCHORS[b, a]) + k + 1 not in SUPERVISED[b]:
                    break
                rows[b, a, k] = True
    return rows


def make_pair(head="vanilla", kind="qwen3", **changes):
    """A target with its taps and a draft with every weight random, so that none can be left out unnoticed."""
    model = make_target(kind, **changes)
    draft = make_draft(model, **HEADS[head])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if "norm" in name or "bias" in name:
                weight.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    return VerifiableTarget(model, draft.config.target_layer_ids), draft


def make_text(batch=2, length=LENGTH):
    return torch.cat([random_ids(length) for _ in range(batch)])


# ---- which rows count


def test_rows_stop_at_the_end_of_the_text_and_of_the_loss_mask():
    rows = supervised_rows(ANCHORS, VALID, loss_mask(), K)
    assert torch.equal(rows, slow_rows()) and rows.dtype == torch.bool
    assert rows.sum(-1).tolist() == [[5, 7, 2, 0, 1], [7, 1, 3, 0, 0]]


def test_rows_follow_the_block_size():
    rows = supervised_rows(ANCHORS, VALID, loss_mask(), 3)
    assert torch.equal(rows, slow_rows()[..., :3])


def test_rows_agree_with_the_trainer():
    trainer = trainer_for(*make_pair())
    _, theirs, _ = trainer._build_dspark_labels_and_mask(make_text(), loss_mask().float(), ANCHORS, VALID)
    assert torch.equal(supervised_rows(ANCHORS, VALID, loss_mask(), K), theirs)


def test_weights_fall_with_the_row():
    rows = slow_rows()
    weights = row_weights(rows)
    assert weights.dtype == torch.float32 and weights.shape == rows.shape
    assert weights[0, 1].tolist() == pytest.approx([math.exp(-k / 4) for k in range(K)])
    assert weights[0, 2].tolist() == pytest.approx([1.0, math.exp(-0.25), 0, 0, 0, 0, 0])
    assert row_weights(rows, gamma=2.0)[1, 2].tolist() == pytest.approx([1.0, math.exp(-0.5), math.exp(-1), 0, 0, 0, 0])


# ---- where blocks begin


def sampling_mask():
    """The loss mask, and a third sequence in which every token is to be learned."""
    return torch.cat([loss_mask(), torch.ones(1, LENGTH, dtype=torch.bool)])


def candidates(mask):
    """Positions with something before them that the target wrote, as it did the token right behind them."""
    return [{p for p in range(1, mask.shape[1] - 1) if row[p] and row[p + 1]} for row in mask]


def test_anchors_are_distinct_and_have_something_to_learn():
    mask = sampling_mask()
    for count in (1, 4, 100):
        anchors, valid = sample_anchors(mask, count, torch.Generator().manual_seed(0))
        assert anchors.shape == valid.shape == (3, min(count, 18)) and anchors.dtype == torch.long
        assert (anchors >= 0).all() and (anchors < LENGTH).all()
        for row, allowed in enumerate(candidates(mask)):
            drawn = anchors[row, valid[row]].tolist()
            assert len(drawn) == min(count, len(allowed)) == len(set(drawn)) and set(drawn) <= allowed
            assert supervised_rows(anchors, valid, mask, K)[row, :, 0].sum() == len(drawn)


def test_every_position_is_as_likely_an_anchor_as_every_other():
    mask, generator = sampling_mask(), torch.Generator().manual_seed(0)
    counts = torch.zeros(3, LENGTH)
    for _ in range(500):
        anchors, valid = sample_anchors(mask, 3, generator)
        counts.scatter_add_(1, anchors, valid.float())
    for row, allowed in enumerate(candidates(mask)):
        share = 1500 / len(allowed)
        assert counts[row].sum() == 1500 and counts[row].nonzero()[:, 0].tolist() == sorted(allowed)
        # Drawn without replacement, so a count varies less than a Poisson count; 5 deviations are one in a million.
        assert (counts[row, sorted(allowed)] - share).abs().max() < 5 * math.sqrt(share)


def test_the_generator_decides_the_anchors():
    draws = [sample_anchors(loss_mask(), 4, torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_texts_with_nothing_to_learn_get_no_block():
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    anchors, valid = sample_anchors(mask, 4, torch.Generator())
    assert not valid.any() and not supervised_rows(anchors, valid, mask, K).any()


# ---- the objective against a loop


def slow_block(target, draft, trace, ids, row, at):
    """The block with its anchor at `at`, alone, as generation drafts it, then one row after the other in float64.

    Gives hidden `[7, H]`, and up to the end of the text the logits of each row after the true tokens, and its
    confidence.
    """
    weights = {name: weight.double() for name, weight in draft.state_dict().items()}
    head = target.lm_head.weight.detach().double()
    cache = draft.new_cache()
    draft.write_context(trace.features[row : row + 1, :at], torch.arange(at)[None], cache)
    hidden = draft.draft_block(ids[row, at : at + 1], cache, target).hidden[0].double()
    logits, confidence, state = [], [], torch.zeros(8, dtype=torch.double)
    for h, previous in zip(hidden, ids[row, at:]):
        logits.append(head @ h)
        if draft.markov_head is None:
            continue
        kind = draft.config.markov_head_type
        read = embedded = weights["markov_head.markov_w1.weight"][previous]
        if kind == "gated":
            gate = weights["markov_head.gate_proj.weight"] @ torch.cat([h, embedded])
            read = torch.sigmoid(gate + weights["markov_head.gate_proj.bias"]) * embedded
        elif kind == "rnn":
            joint = weights["markov_head.joint_proj.weight"] @ torch.cat([state, embedded, h])
            gate, candidate, output = (joint + weights["markov_head.joint_proj.bias"]).split(8)
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
            read = torch.tanh(output)
        logits[-1] = logits[-1] + weights["markov_head.markov_w2.weight"] @ read
        score = weights["confidence_head.proj.weight"][0] @ torch.cat([h, embedded])
        confidence.append(score + weights["confidence_head.proj.bias"][0])
    return hidden, logits, confidence


def slow_losses(target, draft, trace, ids, rows, gamma=4.0):
    """The objective, a row at a time: each loss, mean acceptance by place, expected length."""
    ce = l1 = bce = weight_sum = 0.0
    accepted, counts, lengths = [0.0] * K, [0] * K, []
    for b, a in rows.any(dim=-1).nonzero().tolist():
        at = int(ANCHORS[b, a])
        _, logits, confidence = slow_block(target, draft, trace, ids, b, at)
        survival, length = 1.0, 1.0
        for k in range(K):
            if not rows[b, a, k]:
                break
            draft_probs = logits[k].softmax(-1)
            target_probs = target.head(trace.hidden[b, at + k]).detach().double().softmax(-1)
            distance = sum(abs(float(d - t)) for d, t in zip(draft_probs, target_probs))
            acceptance = sum(min(float(d), float(t)) for d, t in zip(draft_probs, target_probs))
            weight = math.exp(-k / gamma)
            weight_sum += weight
            ce -= weight * math.log(draft_probs[ids[b, at + k + 1]])
            l1 += weight * distance
            if confidence:
                sure = 1 / (1 + math.exp(-confidence[k]))
                bce -= weight * (acceptance * math.log(sure) + (1 - acceptance) * math.log(1 - sure))
            accepted[k] += acceptance
            counts[k] += 1
            survival *= acceptance
            length += survival
        lengths.append(length)
    ce, l1, bce = ce / weight_sum, l1 / weight_sum, bce / weight_sum
    return SimpleNamespace(
        loss=0.1 * ce + 0.9 * l1 + bce,
        ce=ce,
        l1=l1,
        bce=bce,
        acceptance=[a / n for a, n in zip(accepted, counts)],
        expected_length=sum(lengths) / len(lengths),
    )


@every_head
def test_losses_are_the_written_out_formula(head):
    target, draft = make_pair(head)
    ids = make_text()
    trace = target.observe(ids)
    ours = Distillation(draft, target, chunk_anchors=2)(trace, ids, ANCHORS, slow_rows())
    slow = slow_losses(target, draft, trace, ids, slow_rows())
    for name in ("loss", "ce", "l1", "bce", "expected_length"):
        assert getattr(ours, name).item() == pytest.approx(getattr(slow, name), rel=1e-5), name
    assert ours.acceptance.tolist() == pytest.approx(slow.acceptance, rel=1e-5)
    assert (slow.bce > 0) == (head != "none") and 1.05 < slow.expected_length < 7


def test_gamma_is_honoured():
    target, draft = make_pair()
    ids = make_text()
    trace = target.observe(ids)
    ours = Distillation(draft, target, gamma=1.5)(trace, ids, ANCHORS, slow_rows())
    assert ours.loss.item() == pytest.approx(slow_losses(target, draft, trace, ids, slow_rows(), 1.5).loss, rel=1e-5)


def test_terms_of_one_block_by_hand():
    # Two tokens. The draft says 3 to 1 for token 0, the target 1 to 1: they share 3/4 of the mass.
    draft_logits = torch.tensor([math.log(3.0), 0.0]).expand(1, K, 2)
    rows = torch.tensor([[True, True, False, False, False, False, False]])
    labels = torch.tensor([[0, 1, 0, 0, 0, 0, 0]])
    terms = block_terms(draft_logits, torch.zeros(1, K, 2), torch.zeros(1, K), labels, row_weights(rows))
    second = math.exp(-0.25)
    assert terms.ce.item() == pytest.approx(math.log(4 / 3) + second * math.log(4))
    assert terms.l1.item() == pytest.approx(0.5 * (1 + second))
    assert terms.bce.item() == pytest.approx(math.log(2) * (1 + second))
    assert terms.accepted.tolist() == pytest.approx([0.75, 0.75, 0, 0, 0, 0, 0])
    assert terms.rows.tolist() == [1, 1, 0, 0, 0, 0, 0]
    assert float(terms.expected) == pytest.approx(1 + 0.75 + 0.75**2) and float(terms.blocks) == 1


def test_a_batch_with_nothing_to_learn_moves_nothing():
    target, draft = make_pair()
    ids = make_text()
    losses = Distillation(draft, target, chunk_anchors=2)(
        target.observe(ids), ids, ANCHORS, torch.zeros(2, 5, K).bool()
    )
    losses.loss.backward()
    assert losses.loss == losses.ce == losses.l1 == losses.bce == 0
    assert not any(weight.grad.any() for weight in draft.parameters())
    assert losses.acceptance.isnan().all() and losses.expected_length.isnan()


def test_a_place_without_a_row_has_no_acceptance():
    target, draft = make_pair()
    ids, rows = make_text(), slow_rows()
    rows[..., 5:] = False
    losses = Distillation(draft, target)(target.observe(ids), ids, ANCHORS, rows)
    assert losses.acceptance.isnan().tolist() == [False] * 5 + [True] * 2 and losses.loss.isfinite()


@pytest.mark.parametrize("head", ["vanilla", "none"])
def test_a_bfloat16_pair_is_judged_in_float32(head, monkeypatch):
    target, draft = make_pair(head)
    target.model.bfloat16()
    draft.bfloat16()
    ids, seen = make_text(), []
    watch = lambda *terms: seen.append(terms) or block_terms(*terms)  # noqa: E731
    monkeypatch.setattr(distillation, "block_terms", watch)
    losses = Distillation(draft, target)(target.observe(ids), ids, ANCHORS, slow_rows())
    losses.loss.backward()
    draft_logits, target_logits, confidence, _, weights = seen[0]
    assert draft_logits.dtype == target_logits.dtype == weights.dtype == torch.float32
    assert confidence is None or confidence.dtype == torch.float32
    assert losses.loss.dtype == losses.acceptance.dtype == torch.float32
    assert all(weight.grad.dtype == torch.bfloat16 and weight.grad.isfinite().all() for weight in draft.parameters())


@every_head
def test_mixed_precision_changes_the_losses_by_its_rounding_only(head):
    target, draft = make_pair(head)
    ids = make_text()
    distiller, inputs = Distillation(draft, target, chunk_anchors=2), (target.observe(ids), ids, ANCHORS, slow_rows())
    exact = distiller(*inputs).loss
    with torch.autocast("cpu", torch.bfloat16):
        rough = distiller(*inputs).loss
    rough.backward()
    assert rough.dtype == torch.float32 and rough.item() == pytest.approx(exact.item(), rel=1e-2)
    assert rough != exact, "nothing ran in bfloat16"
    assert all(weight.grad.dtype == torch.float32 and weight.grad.isfinite().all() for weight in draft.parameters())


# ---- the objective against the trainer's own


def trainer_for(target, draft, **options):
    """The trainer's objective over its own draft model with the same weights."""
    reason = "needs the test extra: pip install --no-deps specforge==0.2.0"
    family = pytest.importorskip("specforge.algorithms.common.dflash_family_model", reason=reason)
    from specforge.modeling.draft.dspark import DSparkDraftModel
    from transformers import Qwen3Config

    sizes = ["vocab_size", "hidden_size", "intermediate_size", "head_dim"]
    sizes += ["num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
    config = Qwen3Config(
        **{name: getattr(draft.config, name) for name in sizes},
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        rope_theta=10000.0,
    )
    config.block_size, config.num_target_layers = K, draft.config.num_target_layers
    config.dflash_config = dict(draft.config.dflash_config)
    config._attn_implementation = "eager"
    theirs = DSparkDraftModel(config)
    theirs.load_state_dict(draft.state_dict())
    target.model.requires_grad_(False)  # as the trainer's launcher does
    return family.OnlineDSparkModel(
        theirs,
        target_lm_head=target.lm_head,
        target_embed_tokens=target.backbone.embed_tokens,
        mask_token_id=MASK_TOKEN_ID,
        block_size=K,
        attention_backend="eager",
        loss_decay_gamma=4.0,
        **options,
    )


def assert_agree(ours, loss, metrics, draft, trainer):
    ratio = {name: num / den for name, (num, den) in metrics["ratio_metrics"].items()}
    pairs = {
        "loss": (ours.loss, loss),
        "ce": (ours.ce, ratio["ce_loss"]),
        "l1": (ours.l1, ratio["l1_loss"]),
        "bce": (ours.bce, ratio["confidence_loss"]),
        "expected length": (ours.expected_length, ratio["tau_probabilistic"]),
    }
    for name, (our, their) in pairs.items():
        assert our.item() == pytest.approx(their.item(), rel=1e-5), name
    ours.loss.backward()
    loss.backward()
    theirs = dict(trainer.draft_model.named_parameters())
    assert theirs.keys() == dict(draft.named_parameters()).keys()
    for name, weight in draft.named_parameters():
        assert torch.allclose(weight.grad, theirs[name].grad, rtol=1e-4, atol=1e-6), name


@every_head
def test_losses_and_gradients_agree_with_the_trainer(head):
    target, draft = make_pair(head)
    trainer = trainer_for(target, draft, objective_chunk_blocks=2)
    trainer._sample_anchor_positions = lambda *_: (ANCHORS, VALID)
    ids, mask = make_text(), loss_mask()
    trace = target.observe(ids)
    rows = supervised_rows(ANCHORS, VALID, mask, K)
    ours = Distillation(draft, target, chunk_anchors=2)(trace, ids, ANCHORS, rows)
    loss, _, metrics = trainer(ids, trace.features, mask.float(), trace.hidden)
    assert_agree(ours, loss, metrics, draft, trainer)


def test_losses_agree_on_anchors_the_trainer_draws():
    target, draft = make_pair("gated", kind="text")
    trainer = trainer_for(target, draft, num_anchors=9)
    draw, drawn = trainer._sample_anchor_positions, []
    trainer._sample_anchor_positions = lambda *args: drawn.append(draw(*args)) or drawn[0]
    ids, mask = make_text(3, 40), torch.rand(3, 40) > 0.2
    trace = target.observe(ids)
    loss, _, metrics = trainer(ids, trace.features, mask.float(), trace.hidden)
    anchors, valid = drawn[0]
    ours = Distillation(draft, target)(trace, ids, anchors, supervised_rows(anchors, valid, mask, K))
    assert_agree(ours, loss, metrics, draft, trainer)


# ---- blocks of one sequence, all at once

# Eleven a sequence, out of order, some of them next to each other.
MANY = torch.stack([torch.randperm(LENGTH - 1, generator=torch.Generator().manual_seed(n))[:11] + 1 for n in (0, 1)])


def close(ours, theirs, tolerance=1e-5):
    return torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["text", "qwen3"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_blocks_together_equal_each_alone(kind, attention):
    target, draft = make_pair(kind=kind)
    draft.config._attn_implementation = attention
    assert all(layer.self_attn.config is draft.config for layer in draft.layers)
    ids = make_text()
    trace = target.observe(ids)
    with torch.no_grad():
        hidden = Distillation(draft, target).block_hidden(trace.features, ids, MANY)
    assert hidden.shape == (2, 11, K, 32)
    for b in range(2):
        for a, at in enumerate(MANY[b].tolist()):
            assert close(hidden[b, a].double(), slow_block(target, draft, trace, ids, b, at)[0]), (b, a)


@every_head
def test_logits_and_confidence_equal_each_block_alone(head, monkeypatch):
    target, draft = make_pair(head)
    ids, rows = make_text(), slow_rows()
    trace = target.observe(ids)
    seen = []

    def watched(draft_logits, target_logits, confidence, labels, weights):
        nothing = [None] * len(draft_logits)
        seen.extend(zip(draft_logits, target_logits, nothing if confidence is None else confidence, labels, weights))
        return block_terms(draft_logits, target_logits, confidence, labels, weights)

    monkeypatch.setattr(distillation, "block_terms", watched)
    with torch.no_grad():
        Distillation(draft, target, chunk_anchors=2)(trace, ids, ANCHORS, rows)
    unmatched = rows.any(dim=-1).nonzero().tolist()
    assert sum(bool(weights.any()) for *_, weights in seen) == len(unmatched) == 7
    for b, a in unmatched:
        at, count = int(ANCHORS[b, a]), int(rows[b, a].sum())
        _, logits, confidence = slow_block(target, draft, trace, ids, b, at)
        expected = torch.stack(logits[:count])
        found = [block for block in seen if close(block[0][:count].double(), expected)]
        assert len(found) == 1 and found[0][4].count_nonzero() == count, (b, a)
        _, target_logits, scores, labels, _ = found[0]
        assert close(target_logits[:count], target.head(trace.hidden[b, at : at + count]))
        assert torch.equal(labels[:count], ids[b, at + 1 : at + 1 + count])
        assert scores is None or close(scores[:count].double(), torch.stack(confidence[:count]))


def test_a_block_sees_the_context_before_its_anchor_and_nothing_else():
    target, draft = make_pair()
    ids = make_text()
    features = target.observe(ids).features.clone().requires_grad_()
    hidden = Distillation(draft, target).block_hidden(features, ids, MANY)
    for b in range(2):
        for a, at in enumerate(MANY[b].tolist()):
            for k in (0, K - 1):
                (slope,) = torch.autograd.grad(hidden[b, a, k].square().sum(), features, retain_graph=True)
                read = torch.zeros(2, LENGTH, dtype=torch.bool)
                read[b, :at] = True
                assert torch.equal(slope.abs().sum(-1) > 0, read), (b, a, k)


def test_changes_elsewhere_leave_a_block_alone():
    target, draft = make_pair()
    ids = make_text()
    features = target.observe(ids).features
    distiller = Distillation(draft, target)
    at, own = 8, (0, 2)  # the block that starts at position 8 of the first sequence

    @torch.no_grad()
    def block(features=features, ids=ids, anchors=ANCHORS, own=own):
        return distiller.block_hidden(features, ids, anchors)[own]

    def changed(values, places):
        values = values.clone()
        values[places] = values[places] + 1
        return values

    later, last = (changed(features, (0, places)) for places in (slice(at, None), at - 1))
    elsewhere = changed(ids, (slice(None), [p for p in range(LENGTH) if p != at]))
    assert torch.equal(block(later), block()) and torch.equal(block(ids=elsewhere), block())
    assert not close(block(last), block(), 1e-3) and not close(block(ids=changed(ids, (0, at))), block(), 1e-3)
    # Alone; and with other neighbours, itself once more among them.
    assert close(block(anchors=torch.tensor([[8], [5]]), own=(0, 0)), block())
    crowd = torch.tensor([[9, 7, 1, 8, 19, 8, 12, 2, 3, 8], [4] * 10])
    assert all(close(block(anchors=crowd, own=(0, a)), block()) for a in (3, 5, 9))


# ---- gradients and steps


@every_head
def test_gradients_reach_the_whole_draft_and_nothing_of_the_target(head):
    target, draft = make_pair(head)
    before = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    distiller = Distillation(draft, target, chunk_anchors=2)
    assert {id(weight) for weight in distiller.parameters()} == {id(weight) for weight in draft.parameters()}
    optimizer = torch.optim.AdamW(distiller.parameters(), lr=1e-3)
    seen = {name: torch.zeros_like(weight) for name, weight in draft.named_parameters()}
    for _ in range(3):
        ids = make_text()
        optimizer.zero_grad()
        distiller(target.observe(ids), ids, ANCHORS, slow_rows()).loss.backward()
        for name, weight in draft.named_parameters():
            assert weight.grad is not None and weight.grad.isfinite().all(), name
            seen[name] += weight.grad.abs()
        optimizer.step()
    assert [name for name, gradient in seen.items() if not gradient.any()] == []
    assert all(weight.grad is None for weight in target.model.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in target.model.state_dict().items())


def test_the_trace_carries_no_gradient():
    target, _ = make_pair()
    trace = target.observe(make_text())
    assert not trace.features.requires_grad and not trace.hidden.requires_grad


def test_ten_steps_learn_a_batch():
    target, draft = make_pair()
    ids = make_text()
    trace = target.observe(ids)
    distiller = Distillation(draft, target)
    optimizer = torch.optim.AdamW(distiller.parameters(), lr=1e-2)
    curve = []
    for _ in range(11):
        losses = distiller(trace, ids, ANCHORS, slow_rows())
        optimizer.zero_grad()
        losses.loss.backward()
        optimizer.step()
        curve.append(losses)
    assert curve[-1].loss < 0.75 * curve[0].loss, [losses.loss.item() for losses in curve]
    assert curve[-1].acceptance[0] > curve[0].acceptance[0] + 0.1
    assert curve[-1].expected_length > curve[0].expected_length + 0.3


# ---- chunks and memory


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_chunks_change_nothing(head):
    target, draft = make_pair(head)
    ids = make_text()
    trace = target.observe(ids)
    results = []
    for chunk in (1, 3, 100):
        draft.zero_grad()
        losses = Distillation(draft, target, chunk_anchors=chunk)(trace, ids, ANCHORS, slow_rows())
        losses.loss.backward()
        results.append((losses, {name: weight.grad.clone() for name, weight in draft.named_parameters()}))
    losses, gradients = results[-1]
    for other, slopes in results[:-1]:
        for name in ("loss", "ce", "l1", "bce", "acceptance", "expected_length"):
            assert close(getattr(other, name), getattr(losses, name), 1e-6), name
        assert all(torch.allclose(slopes[name], gradients[name], rtol=1e-5, atol=1e-6) for name in gradients)


class Ledger(TorchDispatchMode):
    """Elements of the tensors made inside: those of the largest one, and the most that were alive at one time."""

    def __init__(self, *models):
        super().__init__()
        self.largest = self.alive = self.peak = 0
        self.known = {weight.untyped_storage()._cdata for model in models for weight in model.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.enter(tensor.untyped_storage(), tensor.element_size())
        return result

    def enter(self, storage, element_size):
        key, size = storage._cdata, storage.nbytes() // element_size
        if key in self.known:
            return
        self.known.add(key)
        self.largest = max(self.largest, size)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self.leave, key, size)

    def leave(self, key, size):
        self.known.discard(key)
        self.alive -= size


def test_logits_exist_one_chunk_at_a_time():
    # A wide vocabulary, so that nothing else comes near the logits of one block.
    vocab, length, count = 6000, 40, 16
    target, draft = make_pair(vocab_size=vocab)
    target.model.requires_grad_(False)
    ids = make_text(1, length)
    anchors = torch.randperm(length - K - 2)[None, :count] + 1
    rows = torch.ones(1, count, K, dtype=torch.bool)
    block = K * vocab
    with Ledger(target.model, draft) as observed:
        trace = target.observe(ids)
    assert observed.largest < block
    ledgers = {}
    for chunk in (2, 4, count):
        draft.zero_grad()
        with Ledger(target.model, draft) as ledgers[chunk]:
            Distillation(draft, target, chunk_anchors=chunk)(trace, ids, anchors, rows).loss.backward()
    assert [ledgers[chunk].largest for chunk in (2, 4, count)] == [2 * block, 4 * block, count * block]
    # What is alive at a time is a few such tensors and the gradients, whatever the number of chunks.
    assert ledgers[2].peak < ledgers[count].peak / 4
    assert ledgers[4].peak < ledgers[count].peak / 2


# ---- the trace of the target


def same_trace(ours, theirs):
    """Equal up to rounding, which the random layers of small targets magnify to 1e-5 of the largest number."""
    return (ours - theirs).abs().max() < 3e-5 * theirs.abs().max()


def test_the_trace_equals_what_the_generation_loop_sees(kind):
    target, _ = make_pair(kind=kind)
    ids = make_text(1, 31)
    with torch.no_grad(), target:
        prompt = target.prefill(ids[:, :5])
        features, logits, at = [prompt.features], [prompt.logits], 5
        # Rounds in which some drafts are right and others wrong.
        for kept in (3, 8, 1, 5, 2, 7):
            block = torch.cat([ids[:, at : at + 8], random_ids(max(0, at + 8 - 31))], dim=1)
            block[:, kept:] = (block[:, kept:] + 1) % 7
            output = target.verify(block)
            target.commit([kept], 8)
            features.append(output.features[:, :kept])
            logits.append(output.logits[:, :kept])
            at += kept
    assert at == 31
    trace = target.observe(torch.cat([ids, make_text(1, 31)]))
    assert trace.features.shape == (2, 31, 96) and trace.hidden.shape == (2, 31, 32)
    assert same_trace(trace.features[:1], torch.cat(features, dim=1))
    assert same_trace(target.head(trace.hidden[:1, 4:]), torch.cat(logits, dim=1))


def test_what_follows_changes_no_trace_before_it(kind):
    target, _ = make_pair(kind=kind)
    ids = make_text(2, 16)
    ids[1, 9:] = 10  # padding on the right
    both, short = target.observe(ids), target.observe(ids[1:, :9])
    assert same_trace(both.features[1:, :9], short.features) and same_trace(both.hidden[1:, :9], short.hidden)


def test_observing_leaves_the_target_as_it_was(kind):
    target, _ = make_pair(kind=kind)
    ids = make_text(1, 12)
    hooks = [name for name in vars(target.model) if name.endswith("hooks") or "hooks_with" in name]
    with torch.no_grad(), target:
        target.prefill(ids[:, :6])
        target.observe(make_text(3, 9))
        assert target.lengths == [6]
        continued = target.verify(ids[:, 6:]).features
    assert same_trace(continued, target.observe(ids).features[:, 6:])
    for module in target.model.modules():
        assert not any(vars(module)[name] for name in hooks)
