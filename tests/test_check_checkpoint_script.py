"""scripts/check_checkpoint.py: each fault it names, in local folders and on a Hub that is not there."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import check_checkpoint
import pytest
import torch
from checkpoint_files import TensorSpec, expected_size, make_header, read_header
from common import TINY_DRAFT
from conftest import ROOT
from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo
from safetensors.torch import load_file, save_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PUBLISHED_BYTES, PUBLISHED_PARAMETERS = 4_498_585_858, 2_249_289_601


def published_shapes() -> dict[str, list[int]]:
    """The published tensors, written down apart from the model's code."""
    shapes = {"fc.weight": [7168, 35840], "hidden_norm.weight": [7168], "norm.weight": [7168]}
    shapes |= {f"markov_head.markov_w{i}.weight": [163840, 256] for i in (1, 2)}
    shapes |= {"confidence_head.proj.weight": [1, 7424], "confidence_head.proj.bias": [1]}
    layer = {"input_layernorm": [7168], "post_attention_layernorm": [7168]}
    layer |= {"self_attn.q_proj": [4096, 7168], "self_attn.k_proj": [1024, 7168], "self_attn.v_proj": [1024, 7168]}
    layer |= {"self_attn.o_proj": [7168, 4096], "self_attn.q_norm": [64], "self_attn.k_norm": [64]}
    layer |= {"mlp.gate_proj": [14336, 7168], "mlp.up_proj": [14336, 7168], "mlp.down_proj": [7168, 14336]}
    return shapes | {f"layers.{i}.{name}.weight": shape for i in range(5) for name, shape in layer.items()}


def write_hollow(path: Path, shapes: dict[str, list[int]], dtype: str = "BF16") -> None:
    """A safetensors file whose data takes no room on the disk: a header, and then a hole."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in sorted(shapes.items()):
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.fixture
def folder(tmp_path):
    """A copy of the small draft, to be spoilt."""
    for name in ("config.json", WEIGHTS):
        shutil.copy(TINY_DRAFT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def weights():
    return load_file(TINY_DRAFT / WEIGHTS)


def change_config(folder: Path, **changes) -> None:
    fields = json.loads((folder / "config.json").read_text()) | changes
    fields = {name: value for name, value in fields.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(fields))


def save(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def problems(folder, *options) -> list[str]:
    out = Path(folder) / "report.json"
    status = check_checkpoint.main([str(folder), *options, "--json", str(out)])
    figures = json.loads(out.read_text())
    assert status == (1 if figures["problems"] else 0) and figures["fits"] == (status == 0)
    return figures["problems"]


def test_without_arguments_the_small_draft_fits(capsys):
    assert check_checkpoint.main([]) == 0
    printed = capsys.readouterr().out
    assert "| tensors | 40 | 40 |" in printed and "It fits." in printed and "headers only" in printed
    assert check_checkpoint.main(["--full"]) == 0
    assert "every value was read" in capsys.readouterr().out


def test_the_published_header(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("checkpoint_files.Place.chunks", None)  # the one way to the data, which is not needed
    shutil.copy(ROOT / "config.json", tmp_path)
    write_hollow(tmp_path / WEIGHTS, published_shapes())
    assert problems(tmp_path) == []
    figures = json.loads((tmp_path / "report.json").read_text())
    row = {"tensors": 62, "parameters": PUBLISHED_PARAMETERS, "dtypes": ["BF16"], "bytes": PUBLISHED_BYTES}
    assert figures["found"] == figures["expected"] == row
    assert "| bytes | 4,498,585,858 | 4,498,585,858 |" in capsys.readouterr().out


def test_headers_are_those_safetensors_writes(tmp_path, weights):
    save(tmp_path, weights)
    specs, places = read_header(tmp_path / WEIGHTS)
    written = (tmp_path / WEIGHTS).read_bytes()
    assert written.startswith(make_header(specs)) and len(written) == expected_size(specs)
    for name, tensor in weights.items():
        assert specs[name] == TensorSpec("F32", tuple(tensor.shape))
        assert b"".join(places[name].chunks()) == tensor.numpy().tobytes()


def cut(data: bytes) -> bytes:
    return data[:-2]


def cut_in_the_header(data: bytes) -> bytes:
    return data[:100]


def lengthened(data: bytes) -> bytes:
    return data + b"more"


def garbled(data: bytes) -> bytes:
    return data[:8] + b"}" + data[9:]


def shifted(data: bytes) -> bytes:
    """The first range of the header begins where the second does."""
    return data.replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1)


def unknown_dtype(data: bytes) -> bytes:
    return data.replace(b'"F32"', b'"F99"', 1)


def nested_dtype(data: bytes) -> bytes:
    return data.replace(b'"dtype":"F32"', b'"dtype":[1.0]', 1)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (cut, "bytes where its header promises 7,781,092: it is cut short"),
        (cut_in_the_header, "model.safetensors has 100 bytes and no whole header"),
        (lambda data: b"", "has 0 bytes and no whole header"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "or it is not a safetensors file"),
        (lengthened, "something was added to it"),
        (garbled, "has a header that cannot be read"),
        (shifted, "the header puts confidence_head.proj.bias"),
        (unknown_dtype, "has dtype 'F99'"),
        (nested_dtype, "has a header that cannot be read"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--full"]])
def test_a_spoilt_file_is_one_line(folder, spoil, words, options):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(spoil(data))
    (line,) = problems(folder, *options)
    assert words in line


def test_every_tensor_that_does_not_fit_has_a_line(folder, weights, capsys):
    weights["fc.bias"] = torch.ones(160)
    del weights["norm.weight"]
    weights["hidden_norm.weight"] = torch.ones(161)
    save(folder, weights)
    assert problems(folder) == [
        "norm.weight is missing.",
        "fc.bias is not a tensor of this model.",
        "hidden_norm.weight is F32 [161] where F32 [160] was expected.",
    ]
    printed = capsys.readouterr().out
    assert "It does not fit:\n- norm.weight is missing.\n" in printed


def test_mixed_and_other_dtypes_are_one_line(folder, weights):
    weights["norm.weight"] = weights["norm.weight"].to(torch.bfloat16)
    save(folder, weights)
    assert problems(folder) == ["The tensors are 1 of BF16, 39 of F32, where config.json says F32 for all."]
    change_config(folder, dtype="bfloat16")
    save(folder, {name: tensor.float() for name, tensor in weights.items()})
    assert problems(folder) == ["The tensors are 40 of F32, where config.json says BF16 for all."]


def test_old_head_names_have_a_line_each(folder, weights):
    old = {("logit_head." + name if "_head." in name else name): tensor for name, tensor in weights.items()}
    save(folder, old)
    lines = problems(folder)
    assert len(lines) == 4 and all("convert_checkpoint.py renames it" in line for line in lines)
    assert lines[0].startswith("logit_head.confidence_head.proj.bias is an old name of confidence_head.proj.bias")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"block_size": 0}, "`block_size` is 0"),
        ({"hidden_size": ...}, "`hidden_size` is None"),
        ({"dtype": "float8_e4m3fn"}, "`dtype` is"),
        ({"dtype": ...}, "config.json has no dtype"),
        ({"architectures": ["Qwen3Model"]}, "config.json has architectures ['Qwen3Model']"),
        ({"dflash_config": ...}, "config.json describes no DSpark draft"),
        ({"speculators_model_type": "dspark"}, "in the layout of speculators, not of this repository"),
        (
            {"dflash_config": ..., "target_layer_ids": [1], "mask_token_id": 3, "markov_rank": 8},
            "in the layout of DeepSpec, not of this repository: scripts/convert_checkpoint.py converts it.",
        ),
    ],
)
def test_a_wrong_or_foreign_config_is_one_line(folder, changes, words):
    change_config(folder, **changes)
    (line,) = problems(folder)
    assert words in line


def test_config_against_weights(folder):
    change_config(folder, intermediate_size=320)
    lines = problems(folder)
    assert len(lines) == 9 and all(".mlp." in line and "320" in line for line in lines)


@pytest.mark.parametrize(
    "content, words", [(None, "There is no config.json."), ("{", "not JSON"), ("[]", "JSON object")]
)
def test_no_config(folder, content, words):
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    (line,) = problems(folder)
    assert words in line


def test_no_weights(folder):
    (folder / WEIGHTS).unlink()
    assert problems(folder) == [f"There is neither {WEIGHTS} nor {INDEX}."]


def split(folder: Path, weights: dict[str, torch.Tensor]) -> dict:
    """The weights as two files with an index, which is returned too."""
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[:20], "model-00002-of-00002.safetensors": names[20:]}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / WEIGHTS).unlink()
    return index


def test_shards(folder, weights):
    index = split(folder, weights)
    assert problems(folder) == [] == problems(folder, "--full")
    figures = json.loads((folder / "report.json").read_text())
    assert len(figures["files"]) == 2 and figures["found"]["parameters"] == figures["expected"]["parameters"]

    last = max(weights)
    index["weight_map"][last] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    assert problems(folder) == [
        f"{last} is not in model-00001-of-00002.safetensors, where {INDEX} puts it.",
        f"{last} is in model-00002-of-00002.safetensors, and {INDEX} does not say so.",
    ]
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert f"model-00002-of-00002.safetensors is named in {INDEX} and is not there." in problems(folder)
    index["weight_map"] = {"norm.weight": "../elsewhere.safetensors"}
    (folder / INDEX).write_text(json.dumps(index))
    assert "weight_map names the files" in problems(folder)[0]
    (folder / INDEX).write_text("{}")
    assert "cannot be read" in problems(folder)[0]


def test_a_tensor_in_two_shards(folder, weights):
    split(folder, weights)
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    twice = load_file(folder / second) | {"confidence_head.proj.bias": weights["confidence_head.proj.bias"]}
    save_file(twice, folder / second)
    assert f"confidence_head.proj.bias is in {second} and in {first}: keep one." in problems(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_full_finds_values_that_are_no_numbers(folder, weights, dtype, monkeypatch):
    monkeypatch.setattr("checkpoint_files.CHUNK", 2**12)
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    weights["fc.weight"][3, 5] = torch.nan
    weights["fc.weight"][-1, -1] = -torch.inf
    weights["norm.weight"][0] = torch.inf
    save(folder, weights)
    change_config(folder, dtype=str(dtype).removeprefix("torch."))
    assert problems(folder) == []
    assert problems(folder, "--full") == [
        "fc.weight has 1 NaN and 1 infinite values of 128,000.",
        "norm.weight has 0 NaN and 1 infinite values of 160.",
    ]


class FakeHub:
    """A Hub with one repository, which is a folder; its headers come as huggingface_hub hands them out."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.calls = folder, []
        names = ("hf_hub_download", "snapshot_download", "get_safetensors_metadata")
        for name in names:
            monkeypatch.setattr(check_checkpoint, name, getattr(self, name))
        monkeypatch.setattr(check_checkpoint, "HfApi", lambda: self)

    def hf_hub_download(self, repo_id, filename):
        self.calls.append(filename)
        return str(self.folder / filename)

    def snapshot_download(self, repo_id, allow_patterns):
        self.calls.append(allow_patterns)
        return str(self.folder)

    def model_info(self, repo_id, files_metadata):
        files = self.folder.iterdir()
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=f.name, size=f.stat().st_size) for f in files])

    def get_safetensors_metadata(self, repo_id):
        files = {}
        for path in self.folder.glob("*.safetensors"):
            data = path.read_bytes()
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            infos = {name: TensorInfo(**entry) for name, entry in header.items() if name != "__metadata__"}
            files[path.name] = SafetensorsFileMetadata(metadata=header["__metadata__"], tensors=infos)
        return SafetensorsRepoMetadata(metadata=None, sharded=len(files) > 1, weight_map={}, files_metadata=files)


def test_a_repository_is_checked_by_its_headers(folder, weights, monkeypatch, capsys):
    hub = FakeHub(folder, monkeypatch)
    assert check_checkpoint.main(["owner/name"]) == 0
    assert hub.calls == ["config.json"] and "owner/name: 1 file of weights (headers only" in capsys.readouterr().out
    assert check_checkpoint.main(["owner/name", "--full"]) == 0
    assert hub.calls[1] == ["config.json", "*.safetensors", INDEX]
    split(folder, weights)
    assert check_checkpoint.main(["owner/name"]) == 0
    del weights["norm.weight"]
    (folder / INDEX).unlink()
    for path in folder.glob("*-of-*"):
        path.unlink()
    save(folder, weights)
    assert check_checkpoint.main(["owner/name"]) == 1
    assert "norm.weight is missing" in capsys.readouterr().out


def test_a_repository_whose_file_is_cut_short(folder, monkeypatch, capsys):
    os.truncate(folder / WEIGHTS, 100_000)
    FakeHub(folder, monkeypatch)
    assert check_checkpoint.main(["owner/name"]) == 1
    assert (
        "model.safetensors has 100,000 bytes, its tensors alone 7,777,156: it is cut short." in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "name, words",
    [
        ("nowhere", "neither a folder nor a repository OWNER/NAME"),
        ("a/b/c", "neither a folder nor a repository OWNER/NAME"),
        (str(ROOT / "config.json"), "is a file, expected the folder"),
        ("owner/name", "owner/name is no folder, and could not be read from the Hub"),
    ],
)
def test_nothing_to_check(name, words, capsys):
    assert check_checkpoint.main([name]) == 2
    assert words in capsys.readouterr().err
