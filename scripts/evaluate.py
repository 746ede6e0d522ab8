"""Measure how many of a DSpark draft's tokens a target accepts, with the tables of the model card.

Each question is answered by speculative decoding, and its verify rounds are counted as SGLang 0.5.23 counts them:
`acc_len` is the mean of accepted draft tokens + 1 over the rounds of a request, as verification judged them. It is
averaged within a question over its requests, then over the questions. A request without a round (its first token ended
it) has none and is left out.

With `--json OUT` every finished question is saved in OUT.partial.jsonl at once, and the same command goes on after an
interruption. Without arguments the tiny Kimi K3 of `examples/` and its draft are measured, on Python text that neither
has seen.
"""

import argparse
import hashlib
import importlib.util
import json
import math
import os
import sys
from pathlib import Path

import torch
from common import (
    HELD_OUT_PROMPTS,
    TINY_DRAFT,
    TINY_TARGET,
    encode_prompt,
    is_tiny,
    load_draft,
    load_target,
    read_prompts,
)
from tqdm import tqdm

# Output tokens of a question, from (inclusive) and to (exclusive); 1K is 1,024.
BUCKETS = {
    "0–1K": (0, 1024),
    "1–2K": (1024, 2048),
    "2–4K": (2048, 4096),
    "4–8K": (4096, 8192),
    "8–16K": (8192, 16384),
    "16–32K": (16384, 32768),
    "32K+": (32768, math.inf),
}
BINS = 10  # of the confidence, equally wide
LOOP_TAIL, LOOP_PERIOD = 32, 16  # an answer loops if its last 32 tokens repeat with a period of at most 16
NOTHING = "—"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", default=TINY_TARGET, help="target model, a folder or a Hub id (default: the tiny Kimi K3)"
    )
    parser.add_argument("--draft", help="DSpark draft, a folder or a Hub id (default: the one in examples/)")
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        metavar="FILE",
        default=[HELD_OUT_PROMPTS],
        help="JSONL files, a data set each; a line is a question and holds `turns`, texts, and may hold `question_id`",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="take the first N questions of each file only")
    parser.add_argument("--multi-turn", action="store_true", help="ask all turns of a question, not the first alone")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens to write a turn at most (default: 128)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="0 for greedy decoding (default), else sampling from the target's whole distribution at this temperature",
    )
    parser.add_argument(
        "--verification",
        choices=["token", "block"],
        default="token",
        help="when sampling: judge draft tokens one by one (default), or all together",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed; each question has its own stream (default: 0)"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file too")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the figures as PNG files into this folder")
    arguments = parser.parse_args()
    check_options(parser, arguments)
    try:
        arguments.questions = read_questions(arguments.prompts, arguments.limit)
    except (OSError, ValueError) as error:
        parser.error(f"--prompts: {error}")
    arguments.settings = settings_of(arguments)
    try:
        arguments.finished = {} if arguments.json is None else read_progress(arguments.json, arguments.settings)
    except (OSError, ValueError) as error:
        parser.error(f"--json: {error}")
    return arguments


def check_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with a message about the first option whose value cannot be right."""
    if not (arguments.temperature >= 0 and math.isfinite(arguments.temperature)):
        parser.error(f"--temperature is {arguments.temperature}, expected 0 (greedy) or more")
    if arguments.max_new_tokens < 1:
        parser.error(f"--max-new-tokens is {arguments.max_new_tokens}, expected at least 1")
    if arguments.limit is not None and arguments.limit < 1:
        parser.error(f"--limit is {arguments.limit}, expected at least 1")
    if not is_tiny(arguments.target) and arguments.draft is None:
        parser.error("--target is given without --draft: a draft belongs to its target, name both")
    if arguments.json is not None and (arguments.json.is_dir() or not arguments.json.parent.is_dir()):
        parser.error(f"--json is {arguments.json}, expected a file in a folder that exists")
    if arguments.plot is not None and arguments.plot.exists() and not arguments.plot.is_dir():
        parser.error(f"--plot is {arguments.plot}, expected a folder, and this is a file")
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot draws with matplotlib, which is missing: pip install -r requirements-training.txt")


def main() -> None:
    arguments = parse_arguments()
    target, tokenizer = load_target(arguments.target)
    draft = load_draft(arguments.draft, target)
    try:
        questions = ask_all(draft, target, tokenizer, arguments)
    except KeyboardInterrupt:
        if arguments.json is not None:
            print(f"\nInterrupted. The same command goes on from {progress_file(arguments.json)}.", file=sys.stderr)
        sys.exit(130)
    figures = summarize(questions)
    print(report(figures))
    if arguments.json is not None:
        write_whole(arguments.json, as_json({"settings": arguments.settings, **figures}))
        progress_file(arguments.json).unlink(missing_ok=True)
    if arguments.plot is not None:
        draw(figures, arguments.plot)


# Questions and answers


def read_questions(paths: list[Path], limit: int | None) -> list[dict]:
    """The questions of all files, each with the name of its `dataset`, which is its file's without the ending.

    Raises OSError or ValueError, naming the file, for one that cannot be read, holds no question or has another's name.
    """
    by_dataset: dict[str, list[dict]] = {}
    for path in paths:
        if path.stem in by_dataset:
            raise ValueError(f"{path} would be the second data set named {path.stem!r}: rename the file.")
        questions = read_prompts(path)
        if not questions:
            raise ValueError(f"{path} holds no question, expected at least one line.")
        by_dataset[path.stem] = [{**question, "dataset": path.stem} for question in questions[:limit]]
    return [question for questions in by_dataset.values() for question in questions]


def ask_all(draft, target, tokenizer, arguments: argparse.Namespace) -> list[dict]:
    """The figures of all questions in order; finished ones are taken as they are, and new ones saved one by one."""
    finished, done = arguments.finished, []
    names = [(question["dataset"], question["question_id"]) for question in arguments.questions]
    with tqdm(total=len(names), initial=sum(name in finished for name in names), unit="question") as bar:
        for name, question in zip(names, arguments.questions):
            if name in finished:
                done.append(finished[name])
                continue
            done.append(ask(question, draft, target, tokenizer, arguments))
            if arguments.json is not None:
                save_question(arguments.json, arguments.settings, done[-1])
            bar.set_postfix(acc_len=shown(mean(question["acc_len"] for question in done)), refresh=False)
            bar.update()
    return done


def ask(question: dict, draft, target, tokenizer, arguments: argparse.Namespace) -> dict:
    """Answer one question, all its turns or the first alone, with random numbers of its own; returns its figures.

    Every turn's prompt is the conversation so far, with the answers as the target gave them.
    """
    torch.manual_seed(derived_seed(arguments.seed, question["dataset"], question["question_id"]))
    sampling = {"do_sample": arguments.temperature > 0}
    if arguments.temperature > 0:  # transformers' own default is the 50 likeliest tokens
        sampling |= {"temperature": arguments.temperature, "top_k": 0, "top_p": 1.0}
        sampling["verification"] = arguments.verification
    conversation, turns = [], []
    for text in question["turns"] if arguments.multi_turn else question["turns"][:1]:
        conversation.append(text)
        input_ids = encode_prompt(tokenizer, *conversation).to(target.device)
        output = draft.generate(
            input_ids,
            target=target,
            attention_mask=torch.ones_like(input_ids),  # an answer may hold a pad token
            max_new_tokens=arguments.max_new_tokens,
            return_dict_in_generate=True,
            output_rounds=True,
            **sampling,
        )
        turns.append(measure(output, input_ids.shape[1]))
        answer = output.sequences[0, input_ids.shape[1] :]
        conversation.append(tokenizer.decode(answer, skip_special_tokens=True))
    return question_figures(question["dataset"], question["question_id"], turns)


def derived_seed(*parts) -> int:
    """A seed that depends on nothing but `parts`, so that a question's figures do not depend on those before it."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:7], "big")


# Figures. Each function takes what the ones above it return; None stands for a mean of nothing.


def measure(output, prompt_tokens: int) -> dict:
    """One request's figures from what `generate` returned.

    `accepted` has a number a round. `confidence` has a list a round, the logits of the draft tokens that were judged:
    the accepted ones and the first rejected one. It is None if the draft has no confidence head.
    """
    answer = output.sequences[0, prompt_tokens:].tolist()
    histogram = output.acceptance_histogram[0].tolist()
    confidence = None
    if all(step.confidence is not None for step in output.rounds):
        confidence = [
            [round(logit, 4) for logit in step.confidence[0, : step.accepted + 1].tolist()] for step in output.rounds
        ]
    return {
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(answer),
        "acc_len": acceptance_length(histogram),
        "tokens_per_round": (len(answer) - 1) / sum(histogram) if sum(histogram) else None,
        "histogram": histogram,
        "loops": loops(answer),
        "accepted": [step.accepted for step in output.rounds],
        "confidence": confidence,
    }


def acceptance_length(histogram: list[int]) -> float | None:
    """Mean of accepted + 1 over the rounds of a histogram: (1 + 4 + 8) / 3 for one round each of 0, 3 and 7."""
    rounds = sum(histogram)
    return sum((accepted + 1) * count for accepted, count in enumerate(histogram)) / rounds if rounds else None


def loops(tokens: list[int]) -> bool:
    """Whether the text ends in a loop, which is easy to draft and flatters every figure."""
    tail = tokens[-LOOP_TAIL:]
    return len(tail) == LOOP_TAIL and any(tail[p:] == tail[:-p] for p in range(1, LOOP_PERIOD + 1))


def mean(values) -> float | None:
    """The mean of those `values` that are not None."""
    values = [value for value in values if value is not None]
    return math.fsum(values) / len(values) if values else None


def question_figures(dataset: str, question_id, turns: list[dict]) -> dict:
    return {
        "dataset": dataset,
        "question_id": question_id,
        "acc_len": mean(turn["acc_len"] for turn in turns),
        "tokens_per_round": mean(turn["tokens_per_round"] for turn in turns),
        "turns": turns,
    }


def summarize(questions: list[dict]) -> dict:
    """All figures, from those of the questions: the card's tables, and the questions themselves at the end.

    What is by position, and the calibration, pools the rounds of all requests; the rest are means over questions.
    """
    turns = [turn for question in questions for turn in question["turns"]]
    histogram = [sum(counts) for counts in zip(*(turn["histogram"] for turn in turns))]
    return {
        "datasets": dataset_rows(questions),
        "acc_len": mean(question["acc_len"] for question in questions),
        "tokens_per_round": mean(question["tokens_per_round"] for question in questions),
        "acc_len_without_loops": mean(
            question["acc_len"] for question in questions if not any(turn["loops"] for turn in question["turns"])
        ),
        "requests": len(turns),
        "requests_without_round": sum(turn["acc_len"] is None for turn in turns),
        "requests_that_loop": sum(turn["loops"] for turn in turns),
        "by_output_length": length_rows(questions),
        "by_position": position_rows(histogram),
        "histogram": histogram,
        "calibration": calibration(turns),
        "questions": questions,
    }


def dataset_rows(questions: list[dict]) -> list[dict]:
    """For each data set, in order, its questions and the means over them."""
    rows = []
    for dataset in dict.fromkeys(question["dataset"] for question in questions):
        own = [question for question in questions if question["dataset"] == dataset]
        means = {name: mean(question[name] for question in own) for name in ("acc_len", "tokens_per_round")}
        rows.append({"dataset": dataset, "questions": len(own), **means})
    return rows


def length_rows(questions: list[dict]) -> list[dict]:
    """For each bucket of output lengths its questions, their shortest and longest output, and their mean acc_len.

    A question's output is that of all its turns together.
    """
    rows = []
    for bucket, (low, high) in BUCKETS.items():
        outputs = [
            (sum(turn["new_tokens"] for turn in question["turns"]), question["acc_len"]) for question in questions
        ]
        own = [(length, acc_len) for length, acc_len in outputs if low <= length < high]
        lengths = [length for length, _ in own]
        rows.append(
            {
                "bucket": bucket,
                "questions": len(own),
                "shortest": min(lengths, default=None),
                "longest": max(lengths, default=None),
                "acc_len": mean(acc_len for _, acc_len in own),
            }
        )
    return rows


def position_rows(histogram: list[int]) -> list[dict]:
    """For each draft position k, from 1: the share of rounds that accepted it, among all rounds and among those that
    accepted every position before it."""
    reached = [sum(histogram[accepted:]) for accepted in range(len(histogram))]  # rounds with so many or more
    return [
        {
            "position": k,
            "accepted": reached[k] / reached[0] if reached[0] else None,
            "accepted_given_before": reached[k] / reached[k - 1] if reached[k - 1] else None,
        }
        for k in range(1, len(histogram))
    ]


def calibration(turns: list[dict]) -> dict | None:
    """How far the confidence head's probabilities are from what happened, overall and by draft position.

    The head estimates P(accepted | all before accepted), so a draft token counts if all before it were accepted. None
    if the draft has no such head.
    """
    if any(turn["confidence"] is None for turn in turns):
        return None
    judged: list[list[tuple[float, bool]]] = [[] for _ in range(len(turns[0]["histogram"]) - 1)]
    for turn in turns:
        for accepted, logits in zip(turn["accepted"], turn["confidence"]):
            for row, logit in enumerate(logits):
                judged[row].append((sigmoid(logit), row < accepted))
    return {
        "overall": reliability([pair for pairs in judged for pair in pairs]),
        "by_position": [{"position": row + 1, **reliability(pairs)} for row, pairs in enumerate(judged)],
    }


def sigmoid(logit: float) -> float:
    return (1 + math.tanh(logit / 2)) / 2  # has no exponential to overflow


def reliability(judged: list[tuple[float, bool]]) -> dict:
    """Expected calibration error of pairs of a probability and its outcome, and the bins it is summed over.

    The error is the sum over bins of their share of the pairs times |mean probability - share of true outcomes|.
    """
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for probability, outcome in judged:
        bins[min(int(probability * BINS), BINS - 1)].append((probability, outcome))
    rows = [
        {"tokens": len(pairs), "confidence": mean(p for p, _ in pairs), "accepted": mean(float(o) for _, o in pairs)}
        for pairs in bins
    ]
    gaps = [row["tokens"] * abs(row["confidence"] - row["accepted"]) for row in rows if row["tokens"]]
    return {
        "tokens": len(judged),
        "confidence": mean(p for p, _ in judged),
        "accepted": mean(float(o) for _, o in judged),
        "expected_calibration_error": math.fsum(gaps) / len(judged) if judged else None,
        "bins": rows,
    }


# What is shown


def report(figures: dict) -> str:
    """The figures as tables for people, in Markdown."""
    parts = [
        table(
            ("Dataset", "Questions", "acc_len", "tokens_per_round"),
            [
                (row["dataset"], shown(row["questions"]), shown(row["acc_len"]), shown(row["tokens_per_round"]))
                for row in figures["datasets"]
            ],
        ),
        remarks(figures),
        "acc_len by output length (tokens of a question's answers; 1K is 1,024)",
        table(
            ("Output-token bucket", "Questions", "Actual output range", "acc_len"),
            [
                (row["bucket"], shown(row["questions"]), length_range(row), shown(row["acc_len"]))
                for row in figures["by_output_length"]
            ],
        ),
        "Acceptance by draft position, over all rounds",
        table(
            ("Position", "Accepted", "Accepted, given all before"),
            [
                (shown(row["position"]), shown(row["accepted"]), shown(row["accepted_given_before"]))
                for row in figures["by_position"]
            ],
        ),
        "Rounds by accepted draft tokens",
        table([shown(accepted) for accepted in range(len(figures["histogram"]))], [map(shown, figures["histogram"])]),
        *calibration_report(figures["calibration"]),
    ]
    return "\n\n".join(parts)


def remarks(figures: dict) -> str:
    """The sentences below the first table."""
    lines = [
        f"{shown(figures['requests'])} requests, {shown(sum(figures['histogram']))} rounds, "
        f"tokens_per_round {shown(figures['tokens_per_round'])}."
    ]
    if figures["requests_without_round"]:
        lines.append(f"Requests without a round, left out of acc_len: {shown(figures['requests_without_round'])}.")
    if figures["requests_that_loop"]:
        lines.append(
            f"Answers that end in a loop (the last {LOOP_TAIL} tokens repeat with a period of at most {LOOP_PERIOD}): "
            f"{shown(figures['requests_that_loop'])}. Without their questions acc_len is "
            f"{shown(figures['acc_len_without_loops'])}."
        )
    return "\n".join(lines)


def calibration_report(figures: dict | None) -> list[str]:
    if figures is None:
        return ["The draft has no confidence head, so there is no calibration to show."]
    rows = [(shown(row["position"]), row) for row in figures["by_position"]] + [("all", figures["overall"])]
    return [
        f"Calibration of the confidence head, of draft tokens whose predecessors were all accepted ({BINS} bins)",
        table(
            ("Position", "Tokens", "Mean confidence", "Accepted", "Expected calibration error"),
            [
                (name, *(shown(row[key]) for key in ("tokens", "confidence", "accepted", "expected_calibration_error")))
                for name, row in rows
            ],
        ),
    ]


def table(header, rows) -> str:
    """A Markdown table whose columns are aligned, the first to the left and the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(lines[0]))]
    text = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    text.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in text)


def shown(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def length_range(row: dict) -> str:
    return f"{shown(row['shortest'])}–{shown(row['longest'])}" if row["questions"] else NOTHING


def as_json(figures: dict) -> str:
    """The figures as JSON, indented, but with a line for each question: their lists of rounds are long."""
    head = json.dumps({name: value for name, value in figures.items() if name != "questions"}, indent=2)
    lines = ",\n".join(f"    {json.dumps(question)}" for question in figures["questions"])
    return head.removesuffix("\n}") + f',\n  "questions": [\n{lines}\n  ]\n}}\n'


def draw(figures: dict, folder: Path) -> None:
    """Write acceptance_by_position.png, acc_len_by_output_length.png and, with a confidence head, reliability.png."""
    from matplotlib.figure import Figure

    drawings = {"acceptance_by_position": draw_positions, "acc_len_by_output_length": draw_lengths}
    if figures["calibration"] is not None:
        drawings["reliability"] = draw_reliability
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawing in drawings.items():
        figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        drawing(axes, figures)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(folder / f"{name}.png")


def draw_positions(axes, figures: dict) -> None:
    for key, label in (("accepted", "of all rounds"), ("accepted_given_before", "of rounds that accepted all before")):
        rows = [row for row in figures["by_position"] if row[key] is not None]
        axes.plot([row["position"] for row in rows], [row[key] for row in rows], marker="o", label=label)
    axes.set(xlabel="draft position", ylabel="share accepted", ylim=(0, 1.05), title="Acceptance by draft position")
    axes.legend(frameon=False)


def draw_lengths(axes, figures: dict) -> None:
    rows = figures["by_output_length"]
    bars = axes.bar([row["bucket"] for row in rows], [row["acc_len"] or 0 for row in rows], width=0.6)
    labels = ["" if row["acc_len"] is None else f"{row['acc_len']:.2f}\nn = {row['questions']}" for row in rows]
    axes.bar_label(bars, labels, padding=2)
    axes.set(
        xlabel="output tokens",
        ylabel="acc_len",
        ylim=(0, len(figures["histogram"]) + 0.8),
        title="Acceptance length by output length",
    )


def draw_reliability(axes, figures: dict) -> None:
    overall = figures["calibration"]["overall"]
    rows = [row for row in overall["bins"] if row["tokens"]]
    axes.plot([0, 1], [0, 1], color="grey", linestyle="--", linewidth=1, label="calibrated")
    axes.plot([row["confidence"] for row in rows], [row["accepted"] for row in rows], marker="o", label="draft")
    error = shown(overall["expected_calibration_error"])
    axes.set(xlabel="confidence", ylabel="share accepted", xlim=(0, 1.02), ylim=(0, 1.02))
    axes.set_title(f"Reliability of the confidence head (expected calibration error {error})")
    axes.legend(frameon=False)


# An interrupted run goes on


def settings_of(arguments: argparse.Namespace) -> dict:
    """What the figures of a question depend on. `--limit` only says how many questions there are."""
    return {
        "target": identity(arguments.target),
        "draft": identity(arguments.draft or TINY_DRAFT),
        "prompts": {path.stem: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in arguments.prompts},
        "multi_turn": arguments.multi_turn,
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "verification": arguments.verification,
        "seed": arguments.seed,
    }


def identity(path: str | Path) -> str:
    """A model's name, and for a folder a digest of its configuration and samples of its weights.

    A draft that was trained further lies in the same folder, and its figures must not be mixed with the earlier ones.
    """
    folder, sample = Path(path), 1 << 20
    if not folder.is_dir():
        return str(path)
    digest = hashlib.sha256()
    for file in (
        sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin")) + sorted(folder.glob("config.json"))
    ):
        with file.open("rb") as weights:
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            digest.update(weights.read(sample))
            weights.seek(max(0, file.stat().st_size - sample))
            digest.update(weights.read())
    return f"{folder.resolve().name} ({digest.hexdigest()[:16]})"


def progress_file(out: Path) -> Path:
    return out.with_name(out.name + ".partial.jsonl")


def save_question(out: Path, settings: dict, question: dict) -> None:
    """Append a finished question to the progress file, whose first line holds the settings."""
    path = progress_file(out)
    with path.open("a", encoding="utf-8") as file:
        for record in (question,) if file.tell() else (settings, question):
            file.write(json.dumps(record, separators=(",", ":")) + "\n")


def read_progress(out: Path, settings: dict) -> dict[tuple, dict]:
    """The finished questions of an interrupted run for `out`, by data set and id.

    What follows the file's last line end was cut off by the interruption and is removed. Raises ValueError, naming the
    setting, if the run had another one, and if the file is damaged.
    """
    path = progress_file(out)
    written = path.read_bytes() if path.exists() else b""
    whole = written[: written.rfind(b"\n") + 1]
    if whole != written:
        write_whole(path, whole.decode())
    if not whole:
        return {}
    try:
        before, *finished = [json.loads(line) for line in whole.splitlines()]
        finished = {(question["dataset"], question["question_id"]): question for question in finished}
        differing = [name for name in settings if before.get(name) != settings[name]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}). Delete it to start again.") from None
    if differing:
        name = differing[0]
        raise ValueError(
            f"{path} holds an unfinished run whose {name} is {before.get(name)!r}, and now it is {settings[name]!r}. "
            "Use that run's settings to finish it, or delete the file to start again."
        )
    return finished


def write_whole(path: Path, text: str) -> None:
    """Write a file that is never seen half-written."""
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(text, "utf-8")
    os.replace(unfinished, path)


if __name__ == "__main__":
    main()
