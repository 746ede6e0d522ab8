"""What the scripts share: loading a target and its draft, reading a prompt, and the target's plain decoding to compare
with."""

import functools
import importlib.util
import inspect
import json
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

ROOT = Path(__file__).resolve().parent.parent
TINY_TARGET = ROOT / "examples" / "tiny-kimi-k3"
TINY_DRAFT = ROOT / "examples" / "tiny-kimi-k3-dspark"
HELD_OUT_PROMPTS = TINY_DRAFT / "held_out_prompts.jsonl"
BUILD = ROOT / "build"  # what the scripts make on the way; not part of the repository


def root_class():
    """The draft class of this repository, `DSparkDraftModel`, as AutoModel would load it."""
    return get_class_from_dynamic_module("modeling_dspark.DSparkDraftModel", str(ROOT))


def root_module(draft_class: type, name: str):
    """The root module `name` that `draft_class` works with: every folder a draft is loaded from has its own."""
    return importlib.import_module(f"{draft_class.__module__.rpartition('.')[0]}.{name}")


def is_tiny(target: str | Path) -> bool:
    """Whether a `--target` is the tiny Kimi K3, for which the scripts have defaults."""
    return Path(target).resolve() == TINY_TARGET


def check_matplotlib() -> None:
    """Exit at once, and not after the work, if plots cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("Plots need matplotlib, which is not installed: pip install -r requirements-training.txt")


def load_target(path: str | Path, device: torch.device | None = None):
    """The target model, in its own dtype, on `device` or the best at hand, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    device_map = "auto" if torch.cuda.is_available() else None
    if device is not None:
        device_map = {"": "cpu" if device.type == "cpu" else device}  # accelerate numbers CPUs, loading does not
    target = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype="auto", device_map=device_map)
    return target.eval(), tokenizer


def load_draft(path: str | Path | None, target):
    """The draft at `path`, or without one that of the tiny Kimi K3, on the target's device."""
    draft = AutoModel.from_pretrained(path or TINY_DRAFT, trust_remote_code=True, dtype="auto")
    return draft.to(target.device).eval()


def encode_prompt(tokenizer, *texts: str) -> torch.Tensor:
    """Token ids `[1, prompt]` of a user's turn, or of a whole conversation: turn, answer, turn, ..., turn.

    By the tokenizer's chat template; without one, as the plain text to continue.
    """
    if tokenizer.chat_template is None:
        return tokenizer("".join(texts), return_tensors="pt").input_ids
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


def read_prompts(path: Path) -> list[dict]:
    """The questions of a JSONL file: `turns`, a list of at least one non-empty string, and `question_id`, by default
    the line's number.

    Raises ValueError, naming file and line, for a line that is anything else and for an id that comes twice.
    """
    questions, line_of = [], {}
    # Only a line feed ends a line: a JSON string may hold other characters that `splitlines` takes for an end.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            question = json.loads(line.decode("utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}. Expected one object a line.") from None
        turns = question.get("turns") if isinstance(question, dict) else None
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise ValueError(f'{path}, line {number} has turns {turns!r}, expected {{"turns": [text, ...]}}.')
        name = question.setdefault("question_id", number)
        if not isinstance(name, (str, int)):
            raise ValueError(f"{path}, line {number} has question_id {name!r}, expected a string or an integer.")
        if name in line_of:
            raise ValueError(
                f"{path}, line {number} has question_id {name!r}, as line {line_of[name]} has: rename one."
            )
        line_of[name] = number
        questions.append(question)
    return questions


def stop_ids(model) -> tuple[int, ...]:
    """The end-of-text ids of the model's generation config, or of its config where it has none."""
    ids = getattr(model, "generation_config", None)
    ids = model.config.get_text_config().eos_token_id if ids is None else ids.eos_token_id
    return tuple(ids) if isinstance(ids, (list, tuple)) else () if ids is None else (ids,)


@functools.cache
def cache_argument(model_class: type) -> str:
    """The name of the forward's cache argument, which changed with transformers 5.19."""
    return "cache" if "cache" in inspect.signature(model_class.forward).parameters else "past_key_values"


def forward_on(target, output, input_ids: torch.Tensor, length: int):
    """The forward after the one that returned `output`: `input_ids` `[B, n]`, which bring the text to `length`
    positions."""
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    mask = input_ids.new_ones(len(input_ids), length)
    options = {cache_argument(type(target)): cache}
    return target(input_ids=input_ids, attention_mask=mask, use_cache=True, **options)


@torch.no_grad()
def plain_batch(target, input_ids: torch.Tensor, max_new_tokens: int, temperature: float = 0.0) -> torch.Tensor:
    """Continuations `[B, prompt + new]` of unpadded prompts `[B, prompt]`, one token a forward; stop tokens do not
    stop."""
    input_ids = input_ids.to(target.device)
    output = target(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=True)
    for made in range(1, max_new_tokens + 1):
        logits = output.logits[:, -1].float()
        if temperature:
            token = torch.multinomial((logits / temperature).softmax(dim=-1), 1)
        else:
            token = logits.argmax(dim=-1, keepdim=True)
        input_ids = torch.cat([input_ids, token], dim=1)
        if made < max_new_tokens:
            output = forward_on(target, output, token, input_ids.shape[1])
    return input_ids


@torch.no_grad()
def plain_greedy(target, input_ids: torch.Tensor, max_new_tokens: int, stop_ids=(), **prompt_inputs) -> torch.Tensor:
    """The target's own greedy continuation, `[1, prompt + new]`: one token a forward, no draft involved."""
    output = target(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=True, **prompt_inputs)
    # An image's placeholder stands for many positions; only the target knows how many.
    processed = output.logits.shape[1] if prompt_inputs else input_ids.shape[1]
    for made in range(1, max_new_tokens + 1):
        token = output.logits[:, -1].float().argmax(dim=-1, keepdim=True)
        input_ids = torch.cat([input_ids, token], dim=1)
        processed += 1
        if token.item() in stop_ids or made == max_new_tokens:
            break
        output = forward_on(target, output, token, processed)
    return input_ids
