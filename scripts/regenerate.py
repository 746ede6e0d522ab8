"""Let a target write its own training text: continuations of prompts, for `scripts/train.py` to distil a draft from.

A draft is asked about text its target writes, so that is what it is trained on: each prompt is continued by the target,
greedily or by sampling, and only the continuation is supervised. The output has one JSON object a line, `input_ids` and
`prompt_length`, in tokens rather than text: encoding the text again could cut it into other tokens.

`--held-out OUT` writes prompts instead: passages of the files that the tiny Kimi K3 never saw, to measure on.

Without arguments the tiny Kimi K3 of `examples/` continues passages of the files it was trained on (about 25 minutes on
one core).
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from common import BUILD, TINY_TARGET, encode_prompt, is_tiny, load_target, plain_batch, read_prompts, stop_ids
from tqdm import tqdm
from train_tiny_target import read, split_files

TINY_TEXT = BUILD / "tiny-kimi-k3-text.jsonl"
PASSAGE = 64  # tokens
HELD_OUT_PASSAGES, HELD_OUT_SEED = 200, 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=TINY_TARGET, help="folder or Hub id (default: the tiny Kimi K3)")
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="JSONL files whose lines hold `turns`, of which the first is taken (default: passages of Python)",
    )
    parser.add_argument("--out", type=Path, default=TINY_TEXT, help=f"default: {TINY_TEXT.relative_to(BUILD.parent)}")
    parser.add_argument(
        "--held-out", type=Path, metavar="OUT", help="write held-out prompts to this file and nothing else"
    )
    parser.add_argument("--samples", type=int, default=7680, help="how many passages of Python (default: 7680)")
    parser.add_argument("--max-new-tokens", type=int, default=160, help="tokens a continuation (default: 160)")
    parser.add_argument(
        "--temperatures",
        type=float,
        nargs="+",
        default=[0.0, 1.0],
        help="batch by batch in turn; 0 is greedy (default: 0 1)",
    )
    parser.add_argument("--batch-size", type=int, default=128, help="prompts at once (default: 128)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    arguments = parser.parse_args()
    for name in ("samples", "max_new_tokens", "batch_size"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}, expected at least 1")
    if min(arguments.temperatures) < 0:
        parser.error(f"--temperatures are {arguments.temperatures}, expected 0 (greedy) or more each")
    for path in arguments.prompts or []:
        if not path.is_file():
            parser.error(f"--prompts {path} is not a file")
    if arguments.prompts is None and not is_tiny(arguments.target):
        parser.error("--target is given without --prompts: name the prompts that this target is to continue")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    target, tokenizer = load_target(arguments.target)
    if arguments.held_out is not None:
        arguments.held_out.write_text(held_out_prompts(tokenizer), "utf-8")
        return
    if arguments.prompts is None:
        prompts = passages(tokenizer, split_files()[0], arguments.samples, arguments.seed)
    else:
        questions = [question for path in arguments.prompts for question in read_prompts(path)]
        prompts = [encode_prompt(tokenizer, question["turns"][0])[0] for question in questions]
    regenerate(target, prompts, arguments)


def regenerate(target, prompts: list[torch.Tensor], arguments: argparse.Namespace) -> None:
    """Write a continuation of each prompt to `arguments.out`; the file appears when all are written."""
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = arguments.out.with_suffix(".partial")
    torch.manual_seed(arguments.seed)
    with unfinished.open("w") as out, tqdm(total=len(prompts), unit="text") as progress:
        for number, batch in enumerate(batches_of_one_length(prompts, arguments.batch_size)):
            temperature = arguments.temperatures[number % len(arguments.temperatures)]
            texts = plain_batch(target, batch, arguments.max_new_tokens, temperature)
            for text in texts.tolist():
                row = {"input_ids": up_to_stop(text, batch.shape[1], stop_ids(target)), "prompt_length": batch.shape[1]}
                out.write(json.dumps(row, separators=(",", ":")) + "\n")
            progress.update(len(batch))
    unfinished.replace(arguments.out)


def held_out_prompts(tokenizer) -> str:
    """JSONL of passages of the held-out files, as `scripts/evaluate.py` reads it."""
    prompts = passages(tokenizer, split_files()[1], HELD_OUT_PASSAGES, HELD_OUT_SEED)
    rows = [{"question_id": number, "turns": [tokenizer.decode(ids)]} for number, ids in enumerate(prompts)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def passages(tokenizer, files: list[Path], count: int, seed: int, length: int = PASSAGE) -> list[torch.Tensor]:
    """`count` passages `[length]` of token ids, each from the start of a line of one of `files`, drawn evenly."""
    generator = torch.Generator().manual_seed(seed)
    found: list[torch.Tensor] = []
    lines = [line for path in files for line in lines_with_room(read(path), length)]
    for start in torch.randint(len(lines), (2 * count,), generator=generator).tolist():
        ids = tokenizer(lines[start], return_tensors="pt").input_ids[0, :length]
        if len(ids) == length and len(found) < count:
            found.append(ids)
    return found


def lines_with_room(text: str, length: int) -> list[str]:
    """For each line that is not blank, the text from there on, long enough for `length` tokens in most cases."""
    starts = [0] + [place + 1 for place, letter in enumerate(text) if letter == "\n"]
    reach = 8 * length  # characters
    return [text[start : start + reach] for start in starts if text[start : start + reach].split("\n")[0].strip()]


def batches_of_one_length(prompts: list[torch.Tensor], size: int) -> Iterator[torch.Tensor]:
    """The prompts as batches `[up to size, length]` without padding, short ones first."""
    prompts = sorted(prompts, key=len)
    start = 0
    for end in range(1, len(prompts) + 1):
        if end == len(prompts) or end - start == size or len(prompts[end]) != len(prompts[start]):
            yield torch.stack(prompts[start:end])
            start = end


def up_to_stop(ids: list[int], prompt_length: int, stops: tuple[int, ...]) -> list[int]:
    """The text up to the first stop token behind the prompt, inclusive."""
    for place in range(prompt_length, len(ids)):
        if ids[place] in stops:
            return ids[: place + 1]
    return ids


if __name__ == "__main__":
    main()
