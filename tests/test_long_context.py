"""Long prompts and long contexts: prefill in pieces, what is kept of them, where positions end, growth of the draft's
cache, and the compiled draft."""

import gc
import weakref

import pytest
import torch
from conftest import (
    ROOT,
    Forwards,
    follow,
    make_draft,
    make_scripted_draft,
    make_target,
    pad_left,
    plain_greedy,
    random_ids,
    tensors_of,
)
from dspark import generation_dspark, request_dspark
from dspark.configuration_dspark import DSparkConfig
from dspark.modeling_dspark import DSparkCache
from dspark.target_kimi_k3 import locate_text_model
from torch.utils.mkldnn import to_mkldnn

GREEDY = {"do_sample": False}
DICT = {**GREEDY, "return_dict_in_generate": True}


# Prefill in pieces


def state_of(output) -> dict[str, torch.Tensor]:
    """What target and draft hold after a call."""
    context = output.cache.context
    held = {f"draft.{i}.keys": keys[:, :, : context.length] for i, keys in enumerate(context.keys)}
    held |= {f"draft.{i}.values": values[:, :, : context.length] for i, values in enumerate(context.values)}
    return held | tensors_of(output.cache.memory.cache)


@pytest.mark.parametrize("chunk", [1, 4, 13])
def test_pieces_leave_the_state_of_one_piece(kind, chunk):
    target, prompt = make_target(kind), random_ids(40)
    draft = make_draft(target)
    whole, pieces = (
        draft.generate(prompt, target=target, max_new_tokens=1, prefill_chunk_size=size, output_logits=True, **DICT)
        for size in (40, chunk)
    )
    torch.testing.assert_close(pieces.logits, whole.logits, atol=3e-4, rtol=1e-4)
    expected = state_of(whole)
    assert state_of(pieces).keys() == expected.keys()
    for name, tensor in state_of(pieces).items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-4, rtol=1e-4, msg=f"{name} differs")


def test_pieces_are_16384_tokens_unless_a_configuration_says_otherwise(monkeypatch):
    assert request_dspark.PREFILL_CHUNK_SIZE == 16384
    monkeypatch.setattr(request_dspark, "PREFILL_CHUNK_SIZE", 10)
    target, prompt = make_target("text"), random_ids(37)
    draft, forwards = make_draft(target), Forwards(target)
    widths = []
    for own, argument in ((None, {}), (20, {}), (20, {"prefill_chunk_size": 30})):
        target.generation_config.prefill_chunk_size = own
        forwards.widths.clear()
        draft.generate(prompt, target=target, max_new_tokens=1, **argument, **GREEDY)
        widths.append(list(forwards.widths))
    assert widths == [[10, 10, 10, 7], [20, 17], [30, 7]]


def test_nothing_of_a_piece_is_left_when_the_next_begins(kind, monkeypatch):
    """Neither features nor what the target's layers made of it, beside its cache; and the head sees one position."""
    target, prompt = make_target(kind), random_ids(50)
    draft = make_draft(target)
    made, left, head_rows = [], [], []
    write_context = draft.write_context

    def watch(features, *rest):
        made.append(weakref.ref(features))
        write_context(features, *rest)

    def note(module, args, output):
        made.append(weakref.ref(output))

    def look(module, args, kwargs):
        gc.collect()
        left.append([ref().shape for ref in made if ref() is not None and 25 in ref().shape])

    monkeypatch.setattr(draft, "write_context", watch)
    backbone, head = locate_text_model(target)
    norms = [norm for layer in backbone.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    for module in (backbone.embed_tokens, *norms, backbone.norm):
        module.register_forward_hook(note)
    head.register_forward_hook(lambda *call: head_rows.append(call[2].shape[1]))
    target.register_forward_pre_hook(look, with_kwargs=True)
    draft.generate(prompt, target=target, max_new_tokens=1, prefill_chunk_size=25, **GREEDY)
    assert left == [[], []] and head_rows == [1, 1] and len(made) == 2 * (1 + 10 + 1) + 2


def images_of(target, *grids):
    patch = target.config.vision_config["patch_size"]
    grid = torch.tensor(grids)
    return {"pixel_values": torch.randn(int(grid.prod(dim=1).sum()), 3, patch, patch), "grid_thws": grid}


def test_all_images_are_in_the_first_piece():
    target = make_target("wrapper")
    placeholder = target.config.media_placeholder_token_id
    prompt = torch.tensor([[1, 2, placeholder, 3, 4, placeholder, 5, 1, 2, 6, 3]])
    images = images_of(target, [1, 4, 4], [1, 2, 4])
    text = plain_greedy(target, prompt, 20, **images)
    forwards = Forwards(target)
    output = make_draft(target).generate(
        prompt, target=target, max_new_tokens=20, prefill_chunk_size=2, **images, **GREEDY
    )
    assert forwards.widths[:4] == [6, 2, 2, 1]
    assert torch.equal(output, text)


def test_a_long_turn_of_rows_of_different_lengths_is_prefilled_in_pieces(kind, monkeypatch):
    """What all rows have, and then so few tokens at a time that what a rollback needs of them stays small."""
    monkeypatch.setattr(generation_dspark, "ROLLED_BACK_AT_ONCE", 4)
    target = make_target(kind)
    draft = make_draft(target)
    rows, state = [random_ids(length) for length in (5, 11, 3)], None
    forwards = Forwards(target)
    for turn in range(2):
        ids, mask = pad_left(rows)
        forwards.widths.clear()
        output = draft.generate(
            ids,
            target=target,
            attention_mask=mask,
            max_new_tokens=9,
            past_key_values=state,
            prefill_chunk_size=6,
            **DICT,
        )
        state = output.cache
        for number, row in enumerate(rows):
            text = plain_greedy(target, row, 9)
            assert torch.equal(output.sequences[number, ids.shape[1] :], text[0, row.shape[1] :]), f"turn {turn}"
            rows[number] = torch.cat([text, random_ids((16, 8, 20)[number])], dim=1)
    # One token of the first turn is new to the target too: 17, 9 and 21 tokens, of which 9 in pieces of 6.
    assert forwards.widths[:5] == [6, 3, 4, 4, 4]


# Where positions end


def at_most(draft, positions: int):
    """`draft` with so many positions."""
    draft.config.max_position_embeddings = positions
    return draft


@pytest.mark.parametrize("accepted", [0, 7])
def test_text_up_to_the_last_position(kind, accepted):
    target, prompt = make_target(kind), random_ids(10)
    text = plain_greedy(target, prompt, 40)
    draft = at_most(make_scripted_draft(target, follow(text, lambda: accepted)), 40)
    assert torch.equal(draft.generate(prompt, target=target, max_new_tokens=30, **GREEDY), text[:, :40])


@pytest.mark.parametrize(
    "prompt, budget, message",
    [
        (40, 1, "takes 40 positions, and the draft has 40"),
        (10, 31, "grow to 41 positions, and the draft has 40 .*`max_new_tokens` of 30 at most"),
    ],
)
def test_more_than_the_last_position_is_refused_before_any_forward(prompt, budget, message):
    target = make_target("text")
    forwards = Forwards(target)
    with pytest.raises(ValueError, match=message):
        at_most(make_draft(target), 40).generate(random_ids(prompt), target=target, max_new_tokens=budget, **GREEDY)
    assert forwards.widths == []


def test_positions_of_images_count():
    target = make_target("wrapper")
    prompt = torch.tensor([[1, 2, target.config.media_placeholder_token_id, 3]])
    images = images_of(target, [1, 4, 4])  # four positions, three more than the placeholder
    draft = at_most(make_draft(target), 40)
    text = draft.generate(prompt, target=target, max_new_tokens=33, **images, **GREEDY)
    assert torch.equal(text, plain_greedy(target, prompt, 33, **images))
    forwards = Forwards(target)
    with pytest.raises(ValueError, match="grow to 41 positions.*`max_new_tokens` of 33 at most"):
        draft.generate(prompt, target=target, max_new_tokens=34, **images, **GREEDY)
    assert len(forwards.widths) == 1, "the prompt alone"


def test_context_beyond_the_last_position_is_refused_and_not_written():
    draft = at_most(make_draft(make_target("text")), 8)
    cache, features = draft.new_cache(), torch.zeros(1, 5, draft.fc.in_features)
    draft.write_context(features, torch.arange(5)[None], cache)
    with pytest.raises(ValueError, match="from 5 to 10 positions, and the draft has 8"):
        draft.write_context(features, torch.arange(5, 10)[None], cache)
    draft.write_context(features, torch.arange(5, 10)[None], cache, [3])
    assert cache.lengths == [8]


# The draft's cache


def test_a_token_of_context_takes_20480_bytes():
    cache = DSparkCache(DSparkConfig.from_pretrained(ROOT), 1, torch.bfloat16, torch.device("meta"))
    cache.reserve(65536)
    assert cache.capacity == 65536
    assert sum(buffer.nbytes for buffer in cache.keys + cache.values) == 65536 * 20480


def test_the_cache_grows_by_half_and_keeps_its_place_in_between():
    draft = make_draft(make_target("text"))
    cache, features, places, capacities = draft.new_cache(), torch.randn(1, 8, draft.fc.in_features), [], []
    for start in range(0, 4000, 8):
        draft.write_context(features, torch.arange(start, start + 8)[None], cache)
        place = [buffer.data_ptr() for buffer in cache.keys + cache.values]
        if not places or places[-1] != place:
            places.append(place)
            capacities.append(cache.capacity)
    assert cache.capacity < 1.5 * 4000
    assert all(new == old + old // 2 or new == old + 8 for old, new in zip(capacities, capacities[1:]))
    assert len(places) < 20


@pytest.mark.parametrize("lengths", [[33], [33, 20]])
def test_room_for_a_prompt_and_its_text_is_made_once(lengths, monkeypatch):
    target = make_target("text")
    draft, caches, places = make_draft(target), [], set()
    new_cache, write_context = draft.new_cache, draft.write_context
    monkeypatch.setattr(draft, "new_cache", lambda batch: caches.append(new_cache(batch)) or caches[0])

    def watch(*arguments):
        write_context(*arguments)
        places.add(caches[0].keys[1].data_ptr())

    monkeypatch.setattr(draft, "write_context", watch)
    ids, mask = pad_left([random_ids(length) for length in lengths])
    for budget in (16, 1000):
        caches.clear(), places.clear()
        draft.generate(
            ids,
            target=target,
            attention_mask=mask,
            max_new_tokens=budget,
            prefill_chunk_size=5,
            max_time=None if budget == 16 else 0.0,
            **GREEDY,
        )
        assert len(places) == 1
        assert caches[0].capacity == 33 + 16 + 7, "no room for a long text before it is there"


# The compiled draft


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_no_round_of_a_compiled_draft_compiles_again(head):
    """One graph for the layers and one for drawing, at every length of the context and whenever the cache grows."""
    target = make_target("text")
    draft = make_draft(target, markov_head_type=head)
    cache, features = draft.new_cache(), torch.randn(1, 90, draft.fc.in_features)
    blocks = []
    for at in range(0, 90, 3):
        draft.write_context(features[:, at : at + 3], torch.arange(at, at + 3)[None], cache)
        blocks.append(draft.draft_block(torch.tensor([at % 7]), cache, target))
    torch._dynamo.reset()
    graphs, cache = [], draft.new_cache()

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    draft.compile(backend=backend, dynamic=True, fullgraph=True)
    for block, at in zip(blocks, range(0, 90, 3)):
        draft.write_context(features[:, at : at + 3], torch.arange(at, at + 3)[None], cache)
        compiled = draft.draft_block(torch.tensor([at % 7]), cache, target)
        assert torch.equal(compiled.tokens, block.tokens)
        torch.testing.assert_close(compiled.logits, block.logits)
    assert len(graphs) == 2


def test_the_block_pass_has_one_shape_and_its_buffers_one_place(monkeypatch):
    """What a captured graph needs: in all rounds of a call nothing changes but how much of the buffers is context."""
    target, prompt, seen = make_target("text"), random_ids(9), []
    draft = make_draft(target)
    forward = type(draft).forward

    def watched(self, embeds, position_ids, cache):
        hidden = forward(self, embeds, position_ids, cache)
        tensors = (embeds, position_ids, hidden)
        seen.append([tensor.shape for tensor in tensors] + [t.data_ptr() for t in (*cache.keys, *cache.values)])
        return hidden

    monkeypatch.setattr(type(draft), "forward", watched)
    output = draft.generate(prompt, target=target, max_new_tokens=4, **DICT)
    assert len(seen) == output.num_target_forwards > 1
    assert all(round == seen[0] for round in seen)


def test_a_compiled_draft_samples_and_heeds_processors():
    target, prompt = make_target("text"), random_ids(6)
    draft = make_draft(target)
    calls = [
        dict(repetition_penalty=1.3, **GREEDY),
        dict(do_sample=True, generator=torch.Generator().manual_seed(3)),
        dict(do_sample=True, generator=torch.Generator().manual_seed(3), temperature=0.7, top_k=5),
    ]
    plain = [draft.generate(prompt, target=target, max_new_tokens=20, **call) for call in calls]
    torch._dynamo.reset()
    draft.compile(backend="eager", dynamic=True)
    for call, expected in zip(calls, plain):
        if "generator" in call:
            call["generator"].manual_seed(3)
        assert torch.equal(draft.generate(prompt, target=target, max_new_tokens=20, **call), expected)


# Packed weights


def test_a_draft_with_weights_packed_by_onednn():
    """What a draft in float32 gains most by on a CPU, with PyTorch's own means: same tokens, same acceptance."""
    target, prompt = make_target("text"), random_ids(9)
    draft = make_draft(target)
    plain = draft.generate(prompt, target=target, max_new_tokens=20, **DICT)
    to_mkldnn(draft)  # in place
    assert not isinstance(draft.fc, torch.nn.Linear)
    packed = draft.generate(prompt, target=target, max_new_tokens=20, **DICT)
    assert torch.equal(packed.sequences, plain.sequences)
    assert torch.equal(packed.acceptance_histogram, plain.acceptance_histogram)
