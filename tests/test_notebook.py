"""`notebooks/quickstart.ipynb`: it runs as it is committed, with a small budget, and says what it claims to say."""

import ast
import re

import nbclient
import nbformat
import pytest
import torch
from common import TINY_TARGET, load_draft, load_target
from conftest import ROOT, plain_greedy

PATH = ROOT / "notebooks" / "quickstart.ipynb"
TOKENS = 24


def read():
    return nbformat.read(PATH, as_version=nbformat.NO_CONVERT)


def source_of(notebook, cell_id: str) -> str:
    return next(cell.source for cell in notebook.cells if cell.id == cell_id)


@pytest.fixture(scope="module")
def executed():
    """The outputs of each code cell, by its id: the printed text, and the other outputs by their type."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUICKSTART_MAX_NEW_TOKENS", str(TOKENS))
        patch.setenv("OMP_NUM_THREADS", "1")
        notebook = read()
        client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(PATH.parent)}})
        client.execute()
    outputs = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            shown = {"text": "".join(out.text for out in cell.outputs if out.get("name") == "stdout")}
            for out in cell.outputs:
                shown |= out.get("data", {})
            outputs[cell.id] = shown
    return outputs


def test_the_committed_notebook_is_valid_and_has_no_outputs():
    notebook = read()
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None), cell.id
        assert cell.metadata == {}, cell.id


def test_the_streamed_text_is_the_targets_own(executed):
    target, tokenizer = load_target(TINY_TARGET)
    prompt = tokenizer("import os\n", return_tensors="pt").input_ids
    text = tokenizer.decode(plain_greedy(target, prompt, TOKENS)[0])
    assert text in executed["stream"]["text"] and f"{TOKENS} tokens in" in executed["stream"]["text"]
    assert executed["same"]["text"] == "same text\n"


def test_the_coloured_text_has_every_draft(executed):
    target, tokenizer = load_target(TINY_TARGET)
    draft = load_draft(None, target)
    prompt = tokenizer("import os\n", return_tensors="pt").input_ids
    options = {"max_new_tokens": TOKENS, "return_dict_in_generate": True, "do_sample": False}
    histogram = draft.generate(prompt, target=target, **options).acceptance_histogram[0]
    (page,) = [executed["drafts"]["text/html"]]
    rejected = len(re.findall('class="rejected" style="[^"]*" title="', page))
    # The last round, which the budget may cut, shows fewer.
    assert int((7 - torch.arange(8)) @ histogram) - 7 <= rejected <= int((7 - torch.arange(8)) @ histogram)
    assert rejected > 0 and 'class="accepted"' in page and 'class="bonus"' in page


def test_figures_and_measures_are_shown(executed):
    assert executed["load"]["text"].splitlines()[1].startswith("DSparkDraftModel: ")
    assert executed["positions"]["image/png"] and executed["confidence"]["image/png"]
    (histogram,) = re.findall(r"0 to 7: (\[.*?\])", executed["positions"]["text"])
    histogram = ast.literal_eval(histogram)
    assert len(histogram) == 8 and sum(histogram) >= 8
    length = sum((accepted + 1) * rounds for accepted, rounds in enumerate(histogram)) / sum(histogram)
    assert f"on average: {length:.2f}" in executed["positions"]["text"]
    assert re.search(r"speed-up \d+\.\d\d; threads: 1", executed["speed"]["text"])
    outcomes = re.findall(r"confidence [01]\.\d\d, (accepted|rejected|not judged)", executed["confidence"]["text"])
    order = {"accepted": 0, "rejected": 1, "not judged": 2}
    assert len(outcomes) == 7 and outcomes == sorted(outcomes, key=order.get) and outcomes.count("rejected") <= 1


@pytest.mark.parametrize("folder", [".", "notebooks", "examples/tiny-kimi-k3-dspark"])
def test_it_finds_the_repository_from_any_of_its_folders(folder, monkeypatch):
    monkeypatch.chdir(ROOT / folder)
    monkeypatch.setattr("sys.path", ["elsewhere"])
    names = {}
    exec(source_of(read(), "setup"), names)
    assert names["ROOT"] == ROOT and names["sys"].path[0] == str(ROOT / "scripts")


def test_outside_a_clone_it_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not in a clone of the repository"):
        exec(source_of(read(), "setup"), {})


def test_the_lines_for_the_real_models_are_those_of_the_readme():
    (block,) = re.findall(r"```python\n(.*?)```", source_of(read(), "real-models"), re.DOTALL)
    readme = (ROOT / "README.md").read_text("utf-8")
    assert len(ast.parse(block).body) == 3 and block in readme
