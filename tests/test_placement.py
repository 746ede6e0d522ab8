"""Draft and target on different devices, and a target spread over two.

There is one device here, so a second one is made in Python (`second_device.py`), which refuses whatever a real one
would refuse. It changes the process it is in, so the generations run in a process of their own: this file as a script.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS))  # as a script, in that other process

import torch  # noqa: E402
from conftest import HAS_NATIVE_KIMI, TARGET_KINDS, make_draft, make_target, pad_left, plain_greedy, random_ids  # noqa: E402

# Where target and draft are; "split": the target's layers 2 and up, and its last norm, elsewhere.
PLACEMENTS = {
    "the draft elsewhere": ("cpu", "elsewhere"),
    "the target elsewhere": ("elsewhere", "cpu"),
    "the target split, the draft elsewhere": ("split", "elsewhere"),
}
# transformers 4.57 makes Qwen3's masks with vmap, which knows no device made in Python; the draft may still be there.
KINDS = TARGET_KINDS if HAS_NATIVE_KIMI else [kind for kind in TARGET_KINDS if kind != "qwen3"]
CASES = [(kind, placement) for kind in KINDS for placement in PLACEMENTS]
CASES += [] if HAS_NATIVE_KIMI else [("qwen3", "the draft elsewhere")]
NEW_TOKENS = 10


def continuations(target, draft, device: str) -> dict:
    """Texts by the way they were made: one prompt greedily, a batch sampled in two ways, and a further turn."""
    torch.manual_seed(0)
    rows = [random_ids(length) for length in (9, 5, 7)]
    prompt, (ids, mask) = rows[0].to(device), (tensor.to(device) for tensor in pad_left(rows))
    options = {"target": target, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}

    def sample(**more) -> torch.Tensor:
        output = draft.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            generator=torch.Generator().manual_seed(3),
            output_scores=True,
            **options,
            **more,
        )
        assert output.sequences.device == output.scores[0].device == ids.device
        return output.sequences

    first = draft.generate(prompt, do_sample=False, **options)
    longer = torch.cat([first.sequences, rows[1].to(device)], dim=1)
    further = draft.generate(
        longer, attention_mask=torch.ones_like(longer), past_key_values=first.cache, do_sample=False, **options
    )
    texts = {
        "greedy": first.sequences,
        "further turn": further.sequences,
        "sampled": sample(top_k=0),
        "sampled in blocks, with processors": sample(top_k=5, repetition_penalty=1.2, verification="block"),
    }
    return {way: text.tolist() for way, text in texts.items()}


def spread(target) -> None:
    """Move a target's later layers and its last norm elsewhere, with accelerate's hooks between the parts."""
    import accelerate

    device_map = {}
    for name, _ in [*target.named_parameters(), *target.named_buffers()]:
        before, layers, rest = name.partition("layers.")
        part = f"{before}{layers}{rest.split('.')[0]}" if layers else name.rpartition(".")[0]
        later = layers and int(rest.split(".")[0]) >= 2
        device_map[part] = "elsewhere" if later or part.endswith(("model.norm", "res_norm", "res_proj")) else "cpu"
    accelerate.dispatch_model(target, device_map, main_device="cpu", force_hooks=True)


def place(target, where: str) -> str:
    """Put the target there; returns where its prompts belong."""
    if where != "split":
        target.to(where)
        return where
    target.to("cpu")
    spread(target)
    assert {parameter.device.type for parameter in target.parameters()} == {"cpu", "elsewhere"}
    return "cpu"


def print_answers() -> None:
    """The other process: every kind of target in every placement, and all on the CPU, as JSON."""
    answers = {}
    for kind in TARGET_KINDS:
        target = make_target(kind)
        if kind == "native":  # the other ways of running experts ask for "cpu" or "cuda" by name
            target.set_experts_implementation("eager")
        draft = make_draft(target)
        answers[kind] = {"the CPU": continuations(target, draft, "cpu")}
        for placement in [placement for each, placement in CASES if each == kind]:
            target_place, draft_place = PLACEMENTS[placement]
            device = place(target, target_place)
            answers[kind][placement] = continuations(target, draft.to(draft_place), device)
    print(json.dumps(answers))


@pytest.fixture(scope="module")
def answers() -> dict:
    child = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.parametrize(("kind", "placement"), CASES)
def test_a_second_device_changes_no_token(kind, placement, answers):
    assert answers[kind][placement] == answers[kind]["the CPU"]


def test_what_is_compared_is_the_targets_own_text(kind, answers, no_grad):
    target, mine = make_target(kind), answers[kind]["the CPU"]
    torch.manual_seed(0)
    prompts = [random_ids(length) for length in (9, 5)]
    text = plain_greedy(target, prompts[0], NEW_TOKENS)
    assert mine["greedy"] == text.tolist()
    assert mine["further turn"] == plain_greedy(target, torch.cat([text, prompts[1]], dim=1), NEW_TOKENS).tolist()


@pytest.mark.parametrize(
    "code",
    ["there + torch.ones(2)", "torch.ones(2, 2) @ there", "there[torch.tensor([0, 1])]", "torch.cat([there, here])"],
)
def test_the_second_device_refuses_tensors_of_the_first(code):
    setup = "import torch, second_device; here = torch.ones(2); there = here.to('elsewhere'); there + there; "
    child = subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, cwd=TESTS)
    assert "RuntimeError" in child.stderr and "on the CPU and elsewhere" in child.stderr


if __name__ == "__main__":
    import second_device  # noqa: F401

    print_answers()
