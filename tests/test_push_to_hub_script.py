"""scripts/push_to_hub.py: what would go up, what does, and what keeps it from going. The Hub is a stand-in."""

import json
import shutil
import subprocess
from types import SimpleNamespace

import push_to_hub
import pytest
from common import TINY_DRAFT
from conftest import ROOT
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
EXAMPLE = "examples/tiny-kimi-k3-dspark"


class FakeApi:
    """Records what it is asked, and which files of the folder huggingface_hub's own filter lets through."""

    def __init__(self):
        self.made, self.commits, self.error = [], [], None

    def __call__(self):
        return self

    def create_repo(self, repo_id, exist_ok):
        if self.error is not None:
            raise self.error
        self.made.append((repo_id, exist_ok))

    def upload_folder(self, repo_id, folder_path, allow_patterns, commit_message):
        there = [path.relative_to(folder_path).as_posix() for path in folder_path.rglob("*") if path.is_file()]
        self.commits.append((repo_id, sorted(filter_repo_objects(there, allow_patterns=allow_patterns))))
        return SimpleNamespace(commit_url="https://hub/commit/1")


@pytest.fixture
def hub(monkeypatch):
    api = FakeApi()
    monkeypatch.setattr(push_to_hub, "HfApi", api)
    return api


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A small repository like this one, with root weights that git ignores and files nobody should push."""
    root = tmp_path / "clone"
    (root / EXAMPLE).mkdir(parents=True)
    for name in ("config.json", WEIGHTS):
        shutil.copy(TINY_DRAFT / name, root / name)
        shutil.copy(TINY_DRAFT / name, root / EXAMPLE / name)
    for name in ("README.md", "modeling_dspark.py", "custom_generate/generate.py", "tests/test_it.py", ".ci/run"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    (root / EXAMPLE / "modeling_dspark.py").symlink_to("../../modeling_dspark.py")
    (root / ".gitignore").write_text("/model.safetensors\n/build/\n.cache/\n")
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    for name in ("build/out.json", f"{EXAMPLE}/.cache/blob", "untracked.txt", f"{EXAMPLE}/config.json.bak"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("no")
    monkeypatch.setattr(push_to_hub, "ROOT", root)
    monkeypatch.setattr(push_to_hub, "TINY_DRAFT", root / EXAMPLE)
    return root


PACKAGE = [
    ".ci/run",
    ".gitignore",
    "README.md",
    "config.json",
    "custom_generate/generate.py",
    f"{EXAMPLE}/config.json",
    f"{EXAMPLE}/{WEIGHTS}",
    f"{EXAMPLE}/modeling_dspark.py",
    WEIGHTS,
    "modeling_dspark.py",
    "tests/test_it.py",
]


def test_nothing_is_sent_without_push(clone, hub, tmp_path, capsys):
    out = tmp_path / "files.json"
    assert push_to_hub.main(["--json", str(out)]) == 0
    assert hub.made == hub.commits == []
    figures = json.loads(out.read_text())
    assert sorted(figures["files"]) == sorted(PACKAGE) and not figures["pushed"]
    assert figures["files"][WEIGHTS] == (clone / WEIGHTS).stat().st_size
    # A link counts as what it points to, which is what goes up.
    assert figures["files"][f"{EXAMPLE}/modeling_dspark.py"] == len("# modeling_dspark.py\n")
    printed = capsys.readouterr().out
    assert f"| {WEIGHTS} | 7,781,092 |" in printed and f"| {len(PACKAGE)} files |" in printed
    assert "Nothing was sent. With --push these files go to RadixArk/Kimi-K3-DSpark." in printed


def test_push_sends_exactly_what_was_listed(clone, hub, capsys):
    assert push_to_hub.main(["--push", "--repo-id", "owner/name"]) == 0
    assert hub.made == [("owner/name", True)]
    assert hub.commits == [("owner/name", sorted(PACKAGE))]
    assert "Pushed: https://hub/commit/1" in capsys.readouterr().out


def test_without_weights_those_on_the_hub_stay(clone, hub, capsys):
    (clone / WEIGHTS).unlink()
    assert push_to_hub.main(["--push"]) == 0
    assert hub.commits[0][1] == sorted(set(PACKAGE) - {WEIGHTS})
    assert "the weights on the Hub stay as they are" in capsys.readouterr().out


@pytest.mark.parametrize("folder", [".", EXAMPLE])
def test_a_checkpoint_that_does_not_fit_is_not_pushed(clone, hub, capsys, folder):
    weights = load_file(clone / folder / WEIGHTS)
    del weights["norm.weight"]
    save_file(weights, clone / folder / WEIGHTS, metadata={"format": "pt"})
    assert push_to_hub.main(["--push"]) == 1
    assert hub.made == hub.commits == []
    assert "- norm.weight is missing." in capsys.readouterr().err


def test_a_configuration_that_is_refused_is_not_pushed(clone, hub, capsys):
    (clone / WEIGHTS).unlink()
    (clone / "config.json").write_text("{}")
    assert push_to_hub.main(["--push"]) == 1
    assert "config.json describes no DSpark draft" in capsys.readouterr().err
    (clone / "config.json").write_text("{")
    assert push_to_hub.main(["--push"]) == 1
    assert "config.json is not JSON" in capsys.readouterr().err and hub.made == []


def test_missing_files_and_folders_without_git_are_named(clone, hub, capsys):
    (clone / "README.md").unlink()
    assert push_to_hub.main(["--push"]) == 1
    assert "Tracked, but not there: README.md" in capsys.readouterr().err
    shutil.rmtree(clone / ".git")
    assert push_to_hub.main(["--push"]) == 1
    assert "is no git repository" in capsys.readouterr().err
    assert hub.made == []


def test_a_hub_that_refuses_is_quoted(clone, hub, capsys):
    hub.error = HfHubHTTPError.__new__(HfHubHTTPError, "401")
    hub.error.args = ("401 log in first",)
    assert push_to_hub.main(["--push"]) == 1
    message = capsys.readouterr().err
    assert "HfHubHTTPError" in message and "Traceback" not in message and hub.commits == []


def test_this_repository_is_ready_to_be_listed(hub, tmp_path, capsys):
    """The package as it is: all it takes to load, test and train is in it, what is made on the way is not."""
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("this copy of the repository is not a git clone")
    out = tmp_path / "files.json"
    assert push_to_hub.main(["--json", str(out)]) == 0
    names = set(json.loads(out.read_text())["files"])
    assert {"README.md", "config.json", "modeling_dspark.py", "custom_generate/generate.py"} <= names
    assert {f"{EXAMPLE}/{WEIGHTS}", "examples/tiny-kimi-k3/config.json", "figures/training.png"} <= names
    assert {"scripts/generate.py", "tests/conftest.py", "pytest.ini"} <= names
    assert not [name for name in names if name.startswith("build/") or ".cache" in name]
    assert hub.made == []
