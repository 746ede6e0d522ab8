"""`scripts/benchmark.py`: the arithmetic of its figures, what it times and puts back, and a run of all of it."""

import inspect
import json
import sys

import benchmark as script
import pytest
import qwen3_toy
import torch
import transformers
from common import TINY_DRAFT, TINY_TARGET, plain_greedy, root_class, root_module
from conftest import follow, make_draft, make_scripted_draft, make_target, random_ids

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless a test moves it: `clock[0] += seconds`."""
    time = [0.0]
    monkeypatch.setattr(script, "now", lambda device: time[0])
    return time


class Worker:
    def __init__(self, clock):
        self.clock = clock

    def work(self, seconds: float, fail: bool = False) -> float:
        self.clock[0] += seconds
        if fail:
            raise RuntimeError("in the middle")
        return seconds


def test_timing_adds_up_calls_and_puts_everything_back(clock):
    worker, other = Worker(clock), Worker(clock)
    own = vars(Worker)["work"]
    with pytest.raises(RuntimeError, match="in the middle"):
        with script.timing([(worker, "work", "a"), (Worker, "work", "b")], CPU) as seconds:
            assert list(inspect.signature(worker.work).parameters) == ["seconds", "fail"]
            assert worker.work(2.0) == 2.0 and worker.work(seconds=3.0) == 3.0
            other.work(10.0)
            worker.work(1.0, fail=True)
    assert seconds == {"a": 6.0, "b": 10.0}
    assert "work" not in vars(worker) and vars(Worker)["work"] is own


def test_figures_of_a_repeat():
    prompts = [torch.zeros(1, 10), torch.zeros(1, 20)]
    plain = [torch.zeros(1, 40), torch.zeros(1, 92)]  # 30 and 72 new tokens
    seconds = {
        "plain": {"call": 10.2, "first": 0.2},
        "speculative": {"call": 4.25, "first": 0.25},
        "generate": {"call": 12.75, "first": 0.3},
    }
    forwards = {"1-wide": 0.010, "8-wide": 0.012, "draft": 0.003}
    shares = {"target": 0.7, "draft": 0.2, "rollback": 0.04, "outside": 0.1}
    texts = {"plain": plain, "speculative": plain, "generate": plain}
    figures = script.figures_of_repeat(seconds, shares, forwards, texts, prompts, acc_len=4.5)
    expected = {
        "tokens/s plain": 10.0,
        "tokens/s speculative": 24.0,
        "tokens/s generate": 8.0,
        "speed-up of speculative": 2.4,
        "speed-up of generate": 0.8,
        "speed-up over generate": 3.0,
        "speed-up after the first token": 2.5,
        "t(1-wide), ms": 10.0,
        "t(8-wide), ms": 12.0,
        "t(draft), ms": 3.0,
        "ideal speed-up": 3.0,
        "share of the ideal reached": 2.5 / 3,
        "share of wall time: target": 0.7,
        "share of wall time: draft": 0.2,
        "share of wall time: rollback": 0.04,
        "share of wall time: outside": 0.1,
    }
    assert figures == pytest.approx(expected)


def test_the_report_shows_median_and_spread():
    assert script.spread([3.0, 1.0, 2.5]) == {"median": 2.5, "lowest": 1.0, "highest": 3.0}
    values = {"speed-up of x": script.spread([3.0, 1.0, 2.5]), "share of y": script.spread([0.051])}
    text = script.report("A pair", {"acc_len": 4.321, "figures": values, "same_tokens_as_plain": {"x": 7}})
    assert "A pair: acc_len 4.32" in text and "| speed-up of x | 2.50 | 1.00 | 3.00 |" in text
    assert "| share of y | 5.1 % | 5.1 % | 5.1 % |" in text and "x wrote the same tokens as plain decoding: 7." in text


def test_acc_len_is_pooled_over_the_rounds_of_all_prompts():
    """Two prompts whose means differ: 8 for the first, and 1 for the second, which has more rounds."""
    target = make_target("text")
    prompts = [random_ids(5), random_ids(9)]
    texts = [plain_greedy(target, prompt, 40) for prompt in prompts]
    scripts = [follow(texts[0]), follow(texts[1], accepted=lambda: 0)]
    draft = make_scripted_draft(target, lambda ids: scripts[bool(torch.equal(ids[:, :9], prompts[1]))](ids))
    # 17 tokens: the first by prefill, then two rounds of 8, or sixteen of 1.
    assert script.pooled_acc_len(draft, target, prompts, 17) == pytest.approx((2 * 8 + 16 * 1) / 18)


def test_all_ways_write_what_the_target_writes():
    target = make_target("qwen3")
    prompts = [random_ids(length) for length in (5, 8, 11)]
    written = plain_greedy(target, prompts[0], 12)[0, 5:].tolist()
    end = next(token for token in written if token > 6)  # in no prompt: prompt lookup would take it for an end there
    target.generation_config.eos_token_id = end
    ways = script.make_ways(target, make_draft(target), lookup=True)
    assert list(ways) == ["plain", "speculative", "generate", "prompt_lookup"]
    assert ways["plain"](prompts[0], 30)[0, 5:].tolist() == written[: written.index(end) + 1]
    for prompt in prompts:
        plain = ways["plain"](prompt, 30)
        assert torch.equal(ways["speculative"](prompt, 30), plain)
        assert torch.equal(ways["generate"](prompt, 30), plain)
        assert script.same_text(ways["prompt_lookup"](prompt, 30), plain)
        assert not script.same_text(plain + 1, plain) and not script.same_text(plain[:, :-1], plain)


def test_shares_add_up_and_the_models_are_left_alone(kind):
    target = make_target(kind)
    draft = make_draft(target)
    verifiable = root_module(type(draft), "target_kimi_k3").VerifiableTarget
    commit = vars(verifiable)["commit"]
    shares = script.measure_shares(target, draft, [random_ids(6), random_ids(4)], 24)
    assert shares["target"] + shares["draft"] + shares["outside"] == pytest.approx(1.0)
    assert all(0 < share < 1 for share in shares.values()) and shares["rollback"] < shares["outside"]
    assert vars(verifiable)["commit"] is commit
    assert "forward" not in vars(target) and not {"draft_block", "write_context"} & vars(draft).keys()


def test_forwards_are_timed_at_both_widths_on_the_same_text(kind):
    target = make_target(kind)
    prompt = random_ids(6)
    text = plain_greedy(target, prompt, 33)
    draft = make_draft(target)
    text_ids = text[:, 6:38]
    seen = []
    target.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    times = script.time_forwards(target, draft, [prompt], [text], kept=3)
    assert times.keys() == {"1-wide", "8-wide", "draft"} and min(times.values()) > 0
    widths = [ids.shape[1] for ids in seen]
    assert widths == [6, *[1] * 32, 6, 6, *[8] * 4]
    assert torch.equal(torch.cat(seen[1:33], dim=1), text_ids) and torch.equal(torch.cat(seen[35:], dim=1), text_ids)


def run_main(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments])
    script.main()


def untrained_draft(path: str | None, target):
    """A draft of the right shape: the toy's, or without a path the tiny Kimi K3's."""
    draft_class = root_class()
    fields = qwen3_toy.draft_config() if path else json.loads((TINY_DRAFT / "config.json").read_text("utf-8"))
    return draft_class(draft_class.config_class(**fields)).eval()


def test_the_whole_script(tmp_path, monkeypatch, capsys):
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_TARGET)
    transformers.Qwen3ForCausalLM(qwen3_toy.target_config(tokenizer)).save_pretrained(tmp_path / "toy")
    tokenizer.save_pretrained(tmp_path / "toy")
    monkeypatch.setattr(qwen3_toy, "make_pair", lambda: (tmp_path / "toy", "its draft"))
    monkeypatch.setattr(script, "load_draft", untrained_draft)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "figures.json"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("import os\n", "class A", "def f")))
    options = ("--prompts", str(prompts), "--limit", "2", "--repeats", "2", "--max-new-tokens", "16")
    run_main(monkeypatch, *options, "--json", str(out))
    figures = json.loads(out.read_text("utf-8"))
    assert figures["settings"] == {"prompts": 2, "repeats": 2, "max_new_tokens": 16}
    assert figures["machine"]["torch"] == torch.__version__ and figures["machine"]["threads"] == 1
    # transformers 5 gives the wrapper class `generate` only the first time a process loads it.
    own = {"generate": 2} if "tokens/s generate" in figures["pair"]["figures"] else {}
    assert figures["pair"]["same_tokens_as_plain"] == {"speculative": 2, **own}
    assert figures["qwen3"]["same_tokens_as_plain"] == {"speculative": 2, "generate": 2, "prompt_lookup": 2}
    assert 1 <= figures["pair"]["acc_len"] <= 8
    lookup = {"tokens/s prompt_lookup", "speed-up of prompt_lookup"}
    assert figures["qwen3"]["figures"].keys() - figures["pair"]["figures"].keys() >= lookup
    shown = capsys.readouterr().out
    assert "tiny-kimi-k3: acc_len" in shown and "Qwen3 toy: acc_len" in shown
    ideal = figures["pair"]["figures"]["ideal speed-up"]
    assert f"| ideal speed-up | {ideal['median']:.2f} | {ideal['lowest']:.2f} | {ideal['highest']:.2f} |" in shown


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--limit", "0"), "--limit is 0"),
        (("--repeats", "0"), "--repeats is 0"),
        (("--max-new-tokens", "15"), "--max-new-tokens is 15, expected at least 16"),
        (("--target", "elsewhere"), "--target is given without --draft"),
        (("--prompts", "/nowhere.jsonl"), "--prompts: [Errno 2]"),
        (("--prompts", "/dev/null"), "--prompts /dev/null holds 0 questions"),
        (("--json", "/nowhere/out.json"), "--json is /nowhere/out.json"),
    ],
)
def test_bad_arguments_end_with_a_message(arguments, message, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_main(monkeypatch, *arguments)
    assert message in capsys.readouterr().err


# The Qwen3 toy


def test_the_toy_and_its_draft_fit_each_other(tmp_path):
    from dspark.configuration_dspark import DSparkConfig
    from dspark.modeling_dspark import DSparkDraftModel
    from dspark.request_dspark import check_pair
    from dspark.target_kimi_k3 import VerifiableTarget

    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_TARGET)
    target = transformers.Qwen3ForCausalLM(qwen3_toy.target_config(tokenizer)).eval()
    config = DSparkConfig(**qwen3_toy.draft_config())
    check_pair(DSparkDraftModel(config), VerifiableTarget(target, config.target_layer_ids))
    assert config.mask_token_id == tokenizer.convert_tokens_to_ids("<|mask|>")


def test_a_pair_that_is_there_is_not_made_again(tmp_path, monkeypatch):
    for name in ("TARGET", "DRAFT", "TEXT"):
        monkeypatch.setattr(qwen3_toy, name, tmp_path / name)
    for file in ("TARGET/config.json", "DRAFT/model.safetensors", "TEXT"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.setattr(qwen3_toy, "train_target", lambda: pytest.fail("made again"))
    monkeypatch.setattr(qwen3_toy, "load_target", lambda path: pytest.fail("made again"))
    monkeypatch.setattr(qwen3_toy.subprocess, "run", lambda *args, **kwargs: pytest.fail("made again"))
    assert qwen3_toy.make_pair() == (tmp_path / "TARGET", tmp_path / "DRAFT")
