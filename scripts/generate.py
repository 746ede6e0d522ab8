"""Write text with a Kimi K3 target and a DSpark draft, and say how well the draft did.

Without arguments it runs the tiny Kimi K3 of `examples/`, and compares the text with what that model writes alone. With
`--show-drafts` it shows what each round drafted and what became of it, once the text is written.
"""

import argparse
import importlib.util
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
from common import TINY_TARGET, encode_prompt, is_tiny, load_draft, load_target, plain_greedy
from show_rounds import label_pieces, print_pieces
from transformers import TextStreamer

PROMPT = "import os\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", default=TINY_TARGET, help="target model, a folder or a Hub id (default: the tiny Kimi K3)"
    )
    parser.add_argument("--draft", help="DSpark draft, a folder or a Hub id (default: the tiny Kimi K3's)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="text to continue, or the user's turn where the tokenizer has a chat template")
    source.add_argument("--prompt-file", type=Path, help="read the prompt from a UTF-8 file")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="tokens to write at most (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for greedy decoding (default), else sampling")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument(
        "--show-drafts",
        action="store_true",
        help="show accepted, rejected and the target's own tokens, in colours or, without them, in marks (needs rich)",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file too")
    arguments = parser.parse_args()
    if arguments.temperature < 0:
        parser.error(f"--temperature is {arguments.temperature}, expected 0 (greedy) or more")
    if arguments.max_new_tokens < 1:
        parser.error(f"--max-new-tokens is {arguments.max_new_tokens}, expected at least 1")
    if not is_tiny(arguments.target) and arguments.draft is None:
        parser.error("--target is given without --draft: a draft belongs to its target, name both")
    if arguments.prompt == "":
        parser.error("--prompt is empty, expected at least one character")
    if arguments.prompt_file is not None and not arguments.prompt_file.is_file():
        parser.error(f"--prompt-file {arguments.prompt_file} is not a file")
    if arguments.prompt_file is not None and arguments.prompt_file.stat().st_size == 0:
        parser.error(f"--prompt-file {arguments.prompt_file} is empty, expected at least one character")
    if arguments.show_drafts and importlib.util.find_spec("rich") is None:
        parser.error("--show-drafts colours with rich, which is missing: pip install -r requirements-training.txt")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    target, tokenizer = load_target(arguments.target)
    draft = load_draft(arguments.draft, target)
    input_ids = encode_prompt(tokenizer, read_prompt(arguments)).to(target.device)
    sampling = {"do_sample": arguments.temperature > 0}
    if arguments.temperature:
        sampling["temperature"] = arguments.temperature
    start = time.perf_counter()
    output = draft.generate(
        input_ids,
        target=target,
        max_new_tokens=arguments.max_new_tokens,
        streamer=None if arguments.show_drafts else TextStreamer(tokenizer, skip_special_tokens=True),
        return_dict_in_generate=True,
        output_rounds=arguments.show_drafts,
        **sampling,
    )
    figures = measure(output, input_ids.shape[1], time.perf_counter() - start)
    if arguments.show_drafts:
        pieces = label_pieces(tokenizer, input_ids[0], output.sequences[0], output.rounds)
        figures["pieces"] = [asdict(piece) for piece in pieces]
        print_pieces(pieces)
    print(
        f"\n{figures['new_tokens']} tokens in {figures['rounds']} rounds, acc_len {output.acc_len.item():.2f}, "
        f"{figures['tokens_per_second']:.1f} tokens/s (prefill included)"
    )
    if is_tiny(arguments.target) and not arguments.temperature:
        figures["same_as_target_alone"] = compare(target, input_ids, output.sequences)
    if arguments.json:
        figures["text"] = tokenizer.decode(output.sequences[0, input_ids.shape[1] :], skip_special_tokens=True)
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")


def read_prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt_file is not None:
        return arguments.prompt_file.read_text("utf-8")
    return PROMPT if arguments.prompt is None else arguments.prompt


def measure(output, prompt_tokens: int, seconds: float) -> dict:
    """The run's figures; `acc_len` and `tokens_per_round` are None where there was no round."""
    new_tokens = output.sequences.shape[1] - prompt_tokens
    any_round = output.num_target_forwards > 0
    return {
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "rounds": output.num_target_forwards,
        "acc_len": output.acc_len.item() if any_round else None,
        "tokens_per_round": output.tokens_per_round.item() if any_round else None,
        "acceptance_histogram": output.acceptance_histogram[0].tolist(),
        "tokens_per_second": new_tokens / seconds,
    }


def compare(target, input_ids: torch.Tensor, sequences: torch.Tensor) -> bool:
    """Whether the target alone, one token a forward, writes the same tokens; says so."""
    start = time.perf_counter()
    alone = plain_greedy(target, input_ids, sequences.shape[1] - input_ids.shape[1])
    rate = (sequences.shape[1] - input_ids.shape[1]) / (time.perf_counter() - start)
    same = torch.equal(alone, sequences)
    print(f"The target alone writes {'the same' if same else 'DIFFERENT'} tokens, at {rate:.1f} tokens/s.")
    return same


if __name__ == "__main__":
    main()
