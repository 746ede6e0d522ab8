"""The README as the Hub, a reader and a shell take it: metadata, links, code that runs on the small pair, commands."""

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from common import TINY_DRAFT, TINY_TARGET, load_draft, load_target
from conftest import PLACEHOLDER_ID, ROOT, make_draft, make_target, plain_greedy
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id

README = (ROOT / "README.md").read_text("utf-8")
CARDS = sorted([ROOT / "README.md", *ROOT.glob("examples/*/README.md")])
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """The text without its blocks of code."""
    return FENCE.sub("", text)


def blocks(language: str) -> list[str]:
    return [block for name, block in FENCE.findall(README) if name == language]


def section(title: str) -> str:
    """What stands between the heading and the next one of its level or above."""
    level, rest = re.search(rf"^(#+) {re.escape(title)}$(.*)", README, re.MULTILINE | re.DOTALL).groups()
    return re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


# -- metadata


def test_metadata_is_what_the_hub_accepts():
    """`ModelCard.validate` asks the Hub. What it would check and can be checked here: types, names, known values."""
    card = ModelCard.load(ROOT / "README.md")
    data = card.data
    assert isinstance(data, ModelCardData)
    assert ModelCardData(**data.to_dict()).to_dict() == data.to_dict()
    validate_repo_id(data.base_model)
    assert data.base_model == "moonshotai/Kimi-K3"
    assert data.pipeline_tag in transformers.pipelines.PIPELINE_REGISTRY.get_supported_tasks()
    assert data.library_name == "transformers" and data.language is None
    tags = ["speculative-decoding", "dspark", "dflash", "specforge", "sglang", "long-context"]
    assert data.tags == tags and data.get("inference") is False


def test_relation_to_the_base_model():
    """The Hub knows four (https://huggingface.co/docs/hub/model-cards#specifying-a-base-model) and takes a model that
    states none for a fine-tune. The draft has no weight of Kimi K3's, as a fine-tune, a merge or a quantised copy has:
    it was trained from random initialisation beside the frozen target, and works only with it, as an adapter does."""
    relation = ModelCard.load(ROOT / "README.md").data.get("base_model_relation")
    assert relation in ("adapter", "finetune", "merge", "quantized") and relation == "adapter"


# -- links


def anchors(text: str) -> set[str]:
    """What the Hub and GitHub make of the headings: lower case, spaces to hyphens, punctuation dropped."""
    titles = [title for _, title in HEADING.findall(prose(text))]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("card", CARDS, ids=lambda card: str(card.relative_to(ROOT)))
def test_links_lead_somewhere(card):
    text = card.read_text("utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        assert (card.parent / path).exists(), f"{link} does not exist"
        assert not anchor or path or anchor in anchors(text), f"there is no heading for {link}"


def test_figures_have_a_description():
    images = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", README)
    assert images and all(len(words.split()) > 3 for words, _ in images)


def test_every_citation_has_its_arxiv_number():
    entries = re.findall(r"^@misc\{([\w-]+),\n(.*?)^\}", "\n".join(blocks("bibtex")), re.MULTILINE | re.DOTALL)
    numbers = [re.search(r"eprint\s*= \{(\d{4}\.\d{5})\}", fields)[1] for _, fields in entries]
    assert numbers == ["2607.05147", "2602.06036", "2309.00071", "2211.17192", "2302.01318", "2403.10444"]
    for name, fields in entries:
        assert re.findall(r"^  (\w+)\s*= ", fields, re.MULTILINE) == "title author year eprint archivePrefix".split(), (
            name
        )
        assert fields.count("{") == fields.count("}")


# -- Python

# The small pair in place of the published one; the code of this repository in place of that on the Hub.
SMALL = {
    'AutoModel.from_pretrained("RadixArk/Kimi-K3-DSpark"': f"AutoModel.from_pretrained({str(TINY_DRAFT)!r}",
    '"RadixArk/Kimi-K3-DSpark"': repr(str(ROOT)),
    '"moonshotai/Kimi-K3"': repr(str(TINY_TARGET)),
    'device_map="cuda:0"': 'device_map="cpu"',
    '{"": "cuda:0"}': '{"": "cpu"}',
    '{0: "180GiB"}': '{"cpu": "8GiB"}',
}


def small(code: str) -> str:
    """The code for a laptop: the small pair, and a few tokens."""
    code = code.replace("from_pretrained(\n    ", "from_pretrained(")
    for published, here in SMALL.items():
        code = code.replace(published, here)
    return re.sub(r"max_new_tokens=\d+", "max_new_tokens=12", code)


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.strip().splitlines()[0][:40])
def test_python_compiles(block):
    compile(block, "README.md", "exec")


REPORT = """
import json
prompt, written = inputs["input_ids"], output.sequences
print(json.dumps([type(draft).__name__, prompt.shape[1], list(written.shape), tokenizer.decode(written[0])]))
"""


def test_python_runs_in_the_order_of_the_text(tmp_path):
    """In a process of its own, as a reader's: transformers 5 gives the vision class its `generate` only the first time
    a process loads it."""
    script = tmp_path / "readme.py"
    script.write_text("".join(map(small, blocks("python"))) + REPORT, "utf-8")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    shown, report = run.stdout.rstrip("\n").rsplit("\n", 1)
    name, prompt_length, shape, text = json.loads(report)
    assert name == "DSparkDraftModel" and shape == [1, prompt_length + 12] and text in shown


def one_liners() -> list[str]:
    """The code of the table in "What `generate` takes and returns", one entry a piece of code."""
    table = section("What `generate` takes and returns").split("\n\n")
    rows = next(part for part in table if part.startswith("| |")).strip().splitlines()[2:]
    pieces = [re.findall(r"`([^`]+)`", row.rsplit(" | ", 1)[1]) for row in rows]
    assert len(rows) > 10 and all(pieces)
    return [piece for row in pieces for piece in row]


def as_call(piece: str) -> str:
    """A piece of the table as a whole call: an argument alone goes into one, and dots stand for the usual arguments."""
    if not piece.startswith("draft."):
        piece = f"draft.generate(**inputs, target=target, {piece})"
    return piece.replace("(...", "(**inputs, target=target, do_sample=True").replace("[...]", "[keep]")


@pytest.fixture(scope="module")
def names():
    """What the lines of the table take for granted."""
    target, tokenizer = load_target(TINY_TARGET)
    draft = load_draft(TINY_DRAFT, target)
    inputs = tokenizer("def merge(a, b):", return_tensors="pt")
    output = draft.generate(**inputs, target=target, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    return {
        "torch": torch,
        "draft": draft,
        "TextStreamer": transformers.TextStreamer,
        "tokenizer": tokenizer,
        "target": target,
        "inputs": inputs,
        "prompts": ["import os\n", "def merge(a, b):\n    return"],
        "allowed": lambda row, ids: list(range(200)),
        "keep": lambda ids, scores: scores,
        "output": output,
        "whole_text": torch.cat([output.sequences, output.sequences[:, :4]], dim=1),
    }


def with_images() -> dict:
    """A small vision class with its draft, and a prompt with one image of four patches."""
    target = make_target("wrapper")
    ids = torch.tensor([[1, PLACEHOLDER_ID, 2]])
    images = {"pixels": torch.randn(4, 3, 14, 14), "grid": torch.tensor([[1, 2, 2]])}
    return {"target": target, "draft": make_draft(target), "inputs": {"input_ids": ids}, **images}


@pytest.mark.parametrize("piece", one_liners())
def test_every_line_of_the_table_runs(piece, names):
    if "pixel_values" in piece:
        names = {**names, **with_images()}
    if piece.startswith("draft.compile"):
        names = {**names, "draft": load_draft(TINY_DRAFT, names["target"])}  # the others stay as they are
    result = eval(small(as_call(piece)), names)
    if piece.startswith("draft.compile"):
        return
    prompt = names["inputs"]["input_ids"]
    assert result.dtype == torch.long and result.shape[1] > prompt.shape[1]
    if piece.endswith("do_sample=False)"):
        assert torch.equal(result, plain_greedy(names["target"], prompt, result.shape[1] - prompt.shape[1]))


# -- shell


def script_commands() -> list[list[str]]:
    """Every command of the text that runs a script of ours, in blocks and in lines, as its words."""
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]*\bpython scripts/[^`]*)`", prose(README).replace("\n", " "))
    commands = [shlex.split(part, comments=True) for line in lines for part in line.split("&&")]
    ours = [words for words in commands if any(word.startswith("scripts/") for word in words)]
    assert len(ours) > 8
    return ours


@pytest.fixture(scope="module")
def options_of():
    """The options that a script's `--help` names; each script is asked once."""
    known = {}

    def ask(name: str, capsys, monkeypatch) -> set[str]:
        if name not in known:
            monkeypatch.setattr(sys, "argv", [name, "--help"])
            with pytest.raises(SystemExit, match="0"):
                importlib.import_module(Path(name).stem).main()
            known[name] = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", capsys.readouterr().out))
        return known[name]

    return ask


@pytest.mark.parametrize("words", script_commands(), ids=" ".join)
def test_commands_name_scripts_and_options_that_exist(words, options_of, capsys, monkeypatch):
    at = next(i for i, word in enumerate(words) if word.startswith("scripts/"))
    assert (ROOT / words[at]).is_file()
    asked = {word.partition("=")[0] for word in words[at + 1 :] if word.startswith("--")}
    assert asked <= options_of(words[at], capsys, monkeypatch)


def test_every_script_and_requirements_file_that_the_text_names_exists():
    for name in re.findall(r"(?:scripts|tests|examples|figures|notebooks)/[\w\-/.]*\w", README):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"-r ([\w.-]+\.txt)", README):
        assert (ROOT / name).is_file(), name


# -- the table of paths


def test_table_of_paths_has_every_root_module_and_script():
    listed, folder = set(), None
    for row in section("In this repository").splitlines():
        for name in re.findall(r"`([\w\-/.]+(?:\.\w+|/))`", row.rpartition(" |")[0]) if row.startswith("| `") else ():
            # A bare name after one with a folder lies beside it: "`scripts/ablate.py`, `measure_memory.py`".
            folder = Path(name).parent if "/" in name else folder
            path = name if (ROOT / name).exists() or "/" in name else str(folder / name)
            assert (ROOT / path).exists(), f"{name} in the table does not exist"
            listed.add(path)
    wanted = [*ROOT.glob("*.py"), *ROOT.glob("scripts/*.py")]
    assert {str(path.relative_to(ROOT)) for path in wanted} <= listed
