"""scripts/download_weights.py: what it accepts, refuses, says and leaves behind. Nothing here uses the network."""

import errno
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "download_weights.py"
PUBLISHED_BYTES = 4_498_585_858
PUBLISHED_PARAMETERS = 2_249_289_601
EARLIER_CONTENTS = b"what stood here before"


def load_script():
    spec = importlib.util.spec_from_file_location("download_weights", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    return load_script()


def small_weights() -> dict[str, torch.Tensor]:
    shapes = {"norm.weight": (8,), "fc.weight": (8, 40), "confidence_head.proj.bias": (1,)}
    return {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def write(path: Path, weights: dict[str, torch.Tensor], metadata=None) -> None:
    save_file(weights, path, metadata=metadata or {"format": "pt"})


class FakeHub:
    """Stands in for `hf_hub_download`: writes the file that `put` makes, or raises; records every call."""

    def __init__(self, put):
        self.put = put
        self.calls = []

    def __call__(self, repo_id, filename, *, revision, local_dir):
        self.calls.append((repo_id, filename, revision))
        Path(local_dir).mkdir(exist_ok=True)
        self.put(Path(local_dir) / filename)
        return str(Path(local_dir) / filename)


@pytest.fixture
def hub(script, monkeypatch):
    """Installs a FakeHub whose repository matches, or not, the small table of tensors the script then expects."""

    def install(put) -> FakeHub:
        table = {name: script.TensorSpec("BF16", tuple(tensor.shape)) for name, tensor in small_weights().items()}
        monkeypatch.setattr(script, "expected_tensors", lambda root: table)
        fake = FakeHub(put)
        monkeypatch.setattr(script, "hf_hub_download", fake)
        return fake

    return install


def good(path: Path) -> None:
    write(path, small_weights())


def test_shipped_config_gives_the_published_names_count_and_size(script):
    tensors = script.expected_tensors(ROOT)
    assert len(tensors) == 62
    assert sum(math.prod(spec.shape) for spec in tensors.values()) == PUBLISHED_PARAMETERS
    assert tensors["fc.weight"] == script.TensorSpec("BF16", (7168, 35840))
    assert script.expected_size(tensors) == PUBLISHED_BYTES


@pytest.mark.parametrize("dtype, name", [(torch.bfloat16, "BF16"), (torch.float32, "F32")])
def test_expected_size_is_the_size_safetensors_writes(script, tmp_path, dtype, name):
    weights = {f"layers.{i}.weight": torch.zeros(3, 5 + i, dtype=dtype) for i in range(12)}
    write(tmp_path / "file", weights)
    table = {key: script.TensorSpec(name, tuple(tensor.shape)) for key, tensor in weights.items()}
    assert script.expected_size(table) == (tmp_path / "file").stat().st_size


def test_good_file_is_put_in_place_and_nothing_else_stays(script, hub, tmp_path, capsys):
    fake = hub(good)
    assert script.main(["--folder", str(tmp_path)]) == 0
    assert fake.calls == [("RadixArk/Kimi-K3-DSpark", "model.safetensors", None)]
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert "3 tensors" in capsys.readouterr().out


def test_complete_file_is_not_fetched_again_unless_a_revision_is_named(script, hub, tmp_path, capsys):
    good(tmp_path / "model.safetensors")
    fake = hub(good)
    assert script.main(["--folder", str(tmp_path)]) == 0
    assert fake.calls == []
    assert "already complete" in capsys.readouterr().out
    assert script.main(["--folder", str(tmp_path), "--repo-id", "someone/else", "--revision", "v2"]) == 0
    assert fake.calls == [("someone/else", "model.safetensors", "v2")]


def test_broken_file_in_place_is_replaced(script, hub, tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    fake = hub(good)
    assert script.main(["--folder", str(tmp_path)]) == 0
    assert len(fake.calls) == 1
    good(tmp_path / "reference")
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "reference").read_bytes()


def truncated(path: Path) -> None:
    good(path)
    os.truncate(path, path.stat().st_size - 2)


def not_safetensors(path: Path) -> None:
    path.write_text("<html>sign in</html>")


def empty(path: Path) -> None:
    path.touch()


def renamed(path: Path) -> None:
    weights = small_weights()
    weights["embed_tokens.weight"] = weights.pop("norm.weight")
    write(path, weights)


def wrong_dtype(path: Path) -> None:
    write(path, small_weights() | {"norm.weight": torch.ones(8)})


def wrong_shape(path: Path) -> None:
    write(path, small_weights() | {"fc.weight": torch.ones(40, 8, dtype=torch.bfloat16)})


def other_header(path: Path) -> None:
    write(path, small_weights(), metadata={"format": "pt", "written_by": "something else"})


@pytest.mark.parametrize(
    "put, words",
    [
        (truncated, ["bytes where", "cut short"]),
        (not_safetensors, ["bytes where", "not a safetensors file"]),
        (empty, ["has 0 bytes where", "cut short"]),
        (renamed, ["norm.weight is missing", "embed_tokens.weight is not a tensor of this model"]),
        (wrong_dtype, ["norm.weight is F32 [8] where BF16 [8] was expected"]),
        (wrong_shape, ["fc.weight is BF16 [40, 8] where BF16 [8, 40] was expected"]),
        (other_header, ["bytes where", "header"]),
    ],
)
def test_wrong_file_is_refused_by_name_and_the_old_one_stays(script, hub, tmp_path, capsys, put, words):
    hub(put)
    (tmp_path / "model.safetensors").write_bytes(EARLIER_CONTENTS)
    assert script.main(["--folder", str(tmp_path)]) == 3
    message = capsys.readouterr().err
    assert all(word in message for word in words), message
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == EARLIER_CONTENTS


def test_long_lists_of_differences_are_cut(script, tmp_path):
    expected = {f"layers.{i}.weight": script.TensorSpec("BF16", (2,)) for i in range(62)}
    write(tmp_path / "file", {"layers.0.weight": torch.ones(2, dtype=torch.bfloat16)})
    with pytest.raises(script.WeightsError, match="and 56 more"):
        script.check_file(tmp_path / "file", expected)


def make(error_class, *arguments):
    """An instance without its constructor's demands, which differ between versions of huggingface_hub."""
    return error_class.__new__(error_class, *arguments)


@pytest.mark.parametrize(
    "error, words",
    [
        (make(errors.LocalEntryNotFoundError, "offline"), ["did not answer", "no network"]),
        (make(errors.OfflineModeIsEnabled, "offline"), ["did not answer", "HF_HUB_OFFLINE"]),
        (make(errors.GatedRepoError, "403"), ["conditions", "hf auth login"]),
        (make(errors.RepositoryNotFoundError, "404"), ["no public repository owner/name", "--repo-id"]),
        (make(errors.RevisionNotFoundError, "404"), ["owner/name has no revision 'v9'", "--revision"]),
        (make(errors.EntryNotFoundError, "404"), ["owner/name has no model.safetensors at revision 'v9'"]),
        (make(errors.HFValidationError, "bad name"), ["'owner/name' is not a repository name", "OWNER/NAME"]),
        (make(errors.HfHubHTTPError, "503"), ["refused the request", "again"]),
        (OSError(errno.ENOSPC, "No space left on device"), ["disk ran full", "--folder"]),
        (ConnectionResetError("peer went away"), ["ConnectionResetError: peer went away", "resumes"]),
        (RuntimeError("transfer backend failed"), ["RuntimeError: transfer backend failed", "resumes"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_failed_download_says_why_and_leaves_nothing(script, hub, tmp_path, capsys, error, words):
    def fail(path: Path) -> None:
        raise error

    hub(fail)
    assert script.main(["--folder", str(tmp_path), "--repo-id", "owner/name", "--revision", "v9"]) == 1
    message = capsys.readouterr().err
    assert all(word in message for word in words), message
    assert "Traceback" not in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error, exit_code", [(ConnectionResetError("gone"), 1), (KeyboardInterrupt(), 130)])
def test_interrupted_download_is_kept_for_the_next_run(script, hub, tmp_path, capsys, error, exit_code):
    def stop_halfway(path: Path) -> None:
        (path.parent / "abc.incomplete").write_bytes(b"half")
        raise error

    hub(stop_halfway)
    assert script.main(["--folder", str(tmp_path)]) == exit_code
    assert "Run this script again" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["abc.incomplete"]

    def resume(path: Path) -> None:
        (path.parent / "abc.incomplete").unlink()
        good(path)

    hub(resume)
    assert script.main(["--folder", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_full_disk_is_seen_before_anything_is_fetched(script, hub, tmp_path, capsys, monkeypatch):
    fake = hub(good)
    monkeypatch.setattr(script.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1))
    assert script.main(["--folder", str(tmp_path)]) == 1
    assert "1 are free" in capsys.readouterr().err
    assert fake.calls == [] and list(tmp_path.iterdir()) == []


def test_missing_folder_is_refused(script, hub, tmp_path, capsys):
    fake = hub(good)
    assert script.main(["--folder", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
    assert fake.calls == [] and list(tmp_path.iterdir()) == []


def test_offline_with_the_real_hub_client(tmp_path):
    """The whole command in a process of its own, with huggingface_hub as it is and its offline switch on."""
    command = [sys.executable, str(SCRIPT), "--folder", str(tmp_path / "weights")]
    (tmp_path / "weights").mkdir()
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert "The Hugging Face Hub did not answer" in done.stderr and "Traceback" not in done.stderr
    assert "4,498,585,858 bytes" in done.stdout
    assert list((tmp_path / "weights").iterdir()) == []
