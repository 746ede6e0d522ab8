"""Train a DSpark draft for a target, as the published checkpoint was trained: online distillation on the target's text.

    accelerate launch scripts/train.py --target T --draft-config C --data FILE... --out DIR

Features and target distributions come from the frozen target as training goes (`scripts/distillation.py` has the
objective), texts from `scripts/regenerate.py`. `accelerate config` decides where it runs: one CPU process, several
GPUs, FSDP. Every process holds the whole target.

Without arguments it trains the draft of `examples/` for the tiny Kimi K3, first regenerating the text if need be. In
`--out` it leaves the draft, `log.jsonl` with a line for each step, `curves.png`, and while it runs a checkpoint that
`--resume` continues exactly.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import set_seed
from common import BUILD, TINY_DRAFT, TINY_TARGET, check_matplotlib, is_tiny, load_target, root_class, root_module
from distillation import CE_WEIGHT, CONFIDENCE_WEIGHT, L1_WEIGHT, Distillation, sample_anchors, supervised_rows
from regenerate import TINY_TEXT
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Subset
from tqdm import tqdm
from transformers import get_scheduler

CHECKPOINT = "checkpoint"


def parse_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", default=TINY_TARGET, help="folder or Hub id (default: the tiny Kimi K3)")
    add("--draft-config", type=Path, default=TINY_DRAFT / "config.json", help="JSON file (default: the tiny draft's)")
    add("--data", type=Path, nargs="+", metavar="FILE", help="JSONL of scripts/regenerate.py (default: makes its own)")
    add("--out", type=Path, default=BUILD / "tiny-kimi-k3-dspark", help="default: build/tiny-kimi-k3-dspark")
    add("--steps", type=int, default=7500, help="optimizer steps (default: 7500)")
    add("--batch-size", type=int, default=2, help="texts a process and forward (default: 2)")
    add("--gradient-accumulation", type=int, default=1, help="forwards a step (default: 1)")
    add("--anchors", type=int, default=64, help="anchors a text, at most (default: 64; the published draft: 512)")
    add("--chunk-anchors", type=int, default=64, help="anchors a text in memory at once (default: 64)")
    add("--max-length", type=int, default=4096, help="texts are cut to this many tokens (default: 4096)")
    add(
        "--optimizer",
        choices=["adamw", "muon"],
        default="muon",
        help="muon: for layer matrices, AdamW for the rest (default)",
    )
    add("--learning-rate", type=float, default=5e-3, help="peak, of both (default: 5e-3)")
    add("--schedule", choices=["cosine", "constant"], default="cosine", help="after the warm-up (default: cosine)")
    add("--warmup-steps", type=int, default=100, help="default: 100")
    add("--weight-decay", type=float, default=0.0, help="default: 0")
    add("--max-grad-norm", type=float, default=1.0, help="gradients are clipped to it (default: 1)")
    add("--mixed-precision", choices=["no", "bf16"], help="default: what accelerate is configured to")
    add("--seed", type=int, default=0, help="default: 0")
    add("--save-every", type=int, default=500, help="steps between checkpoints (default: 500)")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    arguments = parser.parse_args(command_line)
    check_arguments(parser, arguments)
    return arguments


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    positive = ("steps", "batch_size", "gradient_accumulation", "anchors", "chunk_anchors", "save_every")
    for name in positive:
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}, expected at least 1")
    if arguments.learning_rate <= 0 or arguments.max_grad_norm <= 0:
        parser.error(
            f"--learning-rate is {arguments.learning_rate} and --max-grad-norm {arguments.max_grad_norm}, expected "
            "more than 0 each"
        )
    if not arguments.draft_config.is_file():
        parser.error(f"--draft-config {arguments.draft_config} is not a file")
    for path in arguments.data or []:
        if not path.is_file():
            parser.error(f"--data {path} is not a file; scripts/regenerate.py makes one")
    if arguments.data is None and not is_tiny(arguments.target):
        parser.error("--target is given without --data: let scripts/regenerate.py write this target's texts first")
    if arguments.resume and not (arguments.out / CHECKPOINT).is_dir():
        parser.error(f"--resume is given, but {arguments.out / CHECKPOINT} is no folder: start without --resume")


@dataclass
class Run:
    """What the loop works with; `model` is the `Distillation` as accelerate wrapped it."""

    accelerator: Accelerator
    target: object
    model: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    schedulers: list
    loader: DataLoader
    arguments: argparse.Namespace


def main(command_line: list[str] | None = None) -> None:
    arguments = parse_arguments(command_line)
    check_matplotlib()
    accelerator = Accelerator(
        mixed_precision=arguments.mixed_precision, gradient_accumulation_steps=arguments.gradient_accumulation
    )
    set_seed(arguments.seed)
    if arguments.data is None:
        arguments.data = [TINY_TEXT]
        if accelerator.is_main_process and not TINY_TEXT.exists():
            subprocess.run([sys.executable, Path(__file__).with_name("regenerate.py")], check=True)
        accelerator.wait_for_everyone()
    run = prepare(accelerator, arguments)
    first_step = resume(run) if arguments.resume else 0
    train(run, first_step)
    accelerator.wait_for_everyone()  # a process that leaves while another still writes would take it down
    accelerator.end_training()


def prepare(accelerator: Accelerator, arguments: argparse.Namespace) -> Run:
    """Target, fresh draft, optimizer, schedule and data, on this process' device and wrapped by accelerate."""
    model, _ = load_target(arguments.target, device=accelerator.device)
    draft_class = root_class()
    config = draft_class.config_class.from_json_file(arguments.draft_config)
    target = root_module(draft_class, "target_kimi_k3").VerifiableTarget(model, config.target_layer_ids)
    draft = draft_class(config).float().train()
    root_module(draft_class, "request_dspark").check_pair(draft, target)
    distillation = Distillation(draft, target, arguments.chunk_anchors)
    optimizers = make_optimizers(draft, arguments)
    name = "constant_with_warmup" if arguments.schedule == "constant" else arguments.schedule
    schedulers = [get_scheduler(name, each, arguments.warmup_steps, arguments.steps) for each in optimizers]
    loader = make_loader(arguments, accelerator.num_processes)
    distillation, loader, *optimizers = accelerator.prepare(distillation, loader, *optimizers)
    # Not prepared: accelerate would step them once per process.
    accelerator.register_for_checkpointing(*schedulers)
    return Run(accelerator, target, distillation, optimizers, schedulers, loader, arguments)


def make_optimizers(draft: torch.nn.Module, arguments: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """AdamW for everything; or Muon for the matrices of the layers and `fc`, and AdamW for the rest.

    Muon's update needs a matrix in one piece, so with sharded weights (FSDP) use AdamW.
    """
    options = {"lr": arguments.learning_rate, "weight_decay": arguments.weight_decay}
    matrices, rest = [], []
    for name, parameter in draft.named_parameters():
        in_muon = arguments.optimizer == "muon" and parameter.ndim == 2 and name.startswith(("layers.", "fc."))
        (matrices if in_muon else rest).append(parameter)
    optimizers = [torch.optim.AdamW(rest, betas=(0.9, 0.95), **options)]
    if matrices:  # its learning rate on AdamW's scale
        optimizers.append(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options))
    return optimizers


def train(run: Run, first_step: int) -> None:
    """Step from `first_step` to `arguments.steps`, logging each step, saving at intervals and at the end."""
    arguments, accelerator = run.arguments, run.accelerator
    log_path = arguments.out / "log.jsonl"
    if accelerator.is_main_process:
        arguments.out.mkdir(parents=True, exist_ok=True)
        keep_lines(log_path, first_step)
    bar = tqdm(total=arguments.steps, initial=first_step, disable=not accelerator.is_main_process, unit="step")
    batches = iter(skip_first_batches(run.loader, first_step * arguments.gradient_accumulation))
    for step in range(first_step, arguments.steps):
        record = {"step": step + 1, **train_step(run, batches, step)}
        if accelerator.is_main_process:
            with log_path.open("a") as log:
                log.write(json.dumps(record) + "\n")
            bar.set_postfix_str(describe(record))
        bar.update()
        if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
            save(run, step + 1)
    bar.close()


def train_step(run: Run, batches: Iterator[dict], step: int) -> dict:
    """One optimizer step; its figures, averaged over forwards and processes."""
    arguments, accelerator, started = run.arguments, run.accelerator, time.perf_counter()
    figures = []
    for part in range(arguments.gradient_accumulation):
        batch = next(batches)
        anchors, rows = choose_blocks(run, batch, step * arguments.gradient_accumulation + part)
        trace = run.target.observe(batch["input_ids"])
        with accelerator.accumulate(run.model):
            losses = run.model(trace, batch["input_ids"], anchors, rows)
            accelerator.backward(losses.loss)
            if accelerator.sync_gradients:
                grad_norm = accelerator.clip_grad_norm_(run.model.parameters(), arguments.max_grad_norm)
            for optimizer in run.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        scalars = torch.stack([losses.loss.detach(), losses.ce, losses.l1, losses.bce, losses.expected_length])
        figures.append(torch.cat([scalars, losses.acceptance]))
    learning_rate = run.schedulers[0].get_last_lr()[0]
    for scheduler in run.schedulers:
        scheduler.step()
    mean = accelerator.reduce(torch.stack(figures).nanmean(dim=0), reduction="mean").tolist()
    names = ("loss", "ce", "l1", "bce", "expected_length")
    return {
        **dict(zip(names, mean)),
        "acceptance": mean[len(names) :],
        "learning_rate": learning_rate,
        "grad_norm": float(grad_norm),
        "seconds": time.perf_counter() - started,
    }


def choose_blocks(run: Run, batch: dict, forward_number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchors and supervised rows; the draw depends on seed, forward and process only, so a resumed run repeats it."""
    arguments, accelerator = run.arguments, run.accelerator
    number = forward_number * accelerator.num_processes + accelerator.process_index
    generator = torch.Generator().manual_seed(arguments.seed * 1_000_003 + number)
    anchors, valid = sample_anchors(batch["loss_mask"], arguments.anchors, generator)
    block_size = accelerator.unwrap_model(run.model).draft.config.block_size
    return anchors, supervised_rows(anchors, valid, batch["loss_mask"], block_size)


class Texts(Dataset):
    """Texts of `scripts/regenerate.py`, cut to `max_length` tokens; those without room for one supervised row are left
    out.

    Raises ValueError, naming file and line, for a line that is something else.
    """

    def __init__(self, paths: list[Path], max_length: int):
        self.rows = []
        for path in paths:
            for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
                ids, prompt_length = parse_text(line, f"{path}, line {number}")
                if min(len(ids), max_length) > max(prompt_length, 2):
                    self.rows.append((torch.tensor(ids[:max_length]), prompt_length))
        if not self.rows:
            raise ValueError(
                f"--data {', '.join(map(str, paths))} hold no text with a continuation within --max-length "
                f"{max_length} tokens. Make some with scripts/regenerate.py."
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index]


def parse_text(line: str, where: str) -> tuple[list[int], int]:
    try:
        row = json.loads(line)
        ids, prompt_length = row["input_ids"], row["prompt_length"]
        if all(isinstance(token, int) for token in ids) and isinstance(prompt_length, int):
            return ids, prompt_length
    except (json.JSONDecodeError, KeyError, TypeError):
        pass
    raise ValueError(
        f'{where} is {line[:60]!r}, expected {{"input_ids": [token, ...], "prompt_length": tokens}} as '
        "scripts/regenerate.py writes it."
    )


def make_loader(arguments: argparse.Namespace, processes: int) -> DataLoader:
    """Batches for the whole run in a fixed order: every epoch a new permutation, whatever step a run starts from."""
    texts = Texts(arguments.data, arguments.max_length)
    needed = arguments.steps * arguments.gradient_accumulation * arguments.batch_size * processes
    generator = torch.Generator().manual_seed(arguments.seed)
    epochs = [torch.randperm(len(texts), generator=generator) for _ in range(math.ceil(needed / len(texts)))]
    order = torch.cat(epochs)[:needed].tolist()
    return DataLoader(Subset(texts, order), batch_size=arguments.batch_size, collate_fn=collate)


def collate(texts: list[tuple[torch.Tensor, int]]) -> dict:
    """`input_ids` `[B, S]` padded on the right, and `loss_mask` `[B, S]`, True on the continuations."""
    lengths = torch.tensor([[len(ids)] for ids, _ in texts])
    prompts = torch.tensor([[prompt_length] for _, prompt_length in texts])
    input_ids = pad_sequence([ids for ids, _ in texts], batch_first=True)
    places = torch.arange(input_ids.shape[1])
    return {"input_ids": input_ids, "loss_mask": (places >= prompts) & (places < lengths)}


def save(run: Run, step: int) -> None:
    """Write the draft and the curves; and, unless it was the last step, a checkpoint in place of the one before."""
    accelerator, out = run.accelerator, run.arguments.out
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(run.model)
    if accelerator.is_main_process:
        save_draft(accelerator.unwrap_model(run.model).draft, state, out)
        plot_curves(out / "log.jsonl", out / "curves.png")
    if step == run.arguments.steps:
        if accelerator.is_main_process:
            shutil.rmtree(out / CHECKPOINT, ignore_errors=True)
        return
    unfinished = out / f"{CHECKPOINT}.unfinished"
    accelerator.save_state(str(unfinished))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (unfinished / "run.json").write_text(json.dumps({"step": step, **recipe(run.arguments)}, indent=2) + "\n")
        shutil.rmtree(out / CHECKPOINT, ignore_errors=True)
        unfinished.rename(out / CHECKPOINT)
    accelerator.wait_for_everyone()


def save_draft(draft, state: dict, folder: Path) -> None:
    """Write config, weights in the config's dtype, and code, so that AutoModel loads the folder.

    Files of `folder` that are links stay: the example's code is the repository's own, and must not be written through.
    """
    # A string where the config came from a bare JSON file.
    dtype = getattr(torch, str(draft.config.dtype or torch.float32).removeprefix("torch."))
    weights = {name.removeprefix("draft."): tensor.to(dtype) for name, tensor in state.items()}
    with tempfile.TemporaryDirectory() as fresh:
        draft.save_pretrained(fresh, state_dict=weights)
        for path in Path(fresh).iterdir():
            if not (folder / path.name).is_symlink():
                shutil.copy(path, folder / path.name)


def recipe(arguments: argparse.Namespace) -> dict:
    """The arguments that a resumed run must share with the run it continues."""
    free = {"out", "resume", "save_every", "chunk_anchors"}
    return {name: str(value) for name, value in vars(arguments).items() if name not in free}


def resume(run: Run) -> int:
    """Load the checkpoint in `--out`; the number of steps it has done. ValueError if it was made another way."""
    folder = run.arguments.out / CHECKPOINT
    before, now = json.loads((folder / "run.json").read_text()), recipe(run.arguments)
    for name, value in now.items():
        if before[name] != value:
            raise ValueError(
                f"--resume: --{name.replace('_', '-')} is {value}, but the checkpoint in {folder} was made with "
                f"{before[name]}. Resume with the same arguments."
            )
    run.accelerator.load_state(str(folder))
    return before["step"]


def keep_lines(log_path: Path, count: int) -> None:
    """Cut the log to its first `count` lines: those of steps that a resumed run does not repeat."""
    lines = log_path.read_text().splitlines(keepends=True) if log_path.exists() else []
    log_path.write_text("".join(lines[:count]))


def describe(record: dict) -> str:
    acceptance = " ".join(f"{rate:.2f}" for rate in record["acceptance"])
    return f"loss {record['loss']:.3f}, acceptance {acceptance}, expected length {record['expected_length']:.2f}"


def plot_curves(log_path: Path, picture: Path, smooth: int = 50) -> None:
    """Draw loss terms, acceptance by position and expected length over the steps, as means over `smooth` steps."""
    from matplotlib.figure import Figure

    records = [json.loads(line) for line in log_path.read_text().splitlines()]
    window = max(1, min(smooth, len(records) // 4))
    table = torch.tensor(
        [[r["loss"], r["ce"], r["l1"], r["bce"], r["expected_length"], *r["acceptance"]] for r in records]
    )
    table = table[: len(table) // window * window].view(-1, window, table.shape[1]).nanmean(dim=1)
    steps = torch.arange(1, len(table) + 1) * window
    figure = Figure(figsize=(12, 3.6), dpi=120, layout="constrained")
    losses, acceptance, length = figure.subplots(1, 3)
    names = ("loss", f"CE (x {CE_WEIGHT})", f"L1 (x {L1_WEIGHT})", f"confidence BCE (x {CONFIDENCE_WEIGHT})")
    for column, name in enumerate(names):
        losses.plot(steps, table[:, column], label=name)
    losses.set(title="Loss terms", xlabel="step")
    losses.legend(frameon=False)
    for position, rates in enumerate(table[:, 5:].T, start=1):
        acceptance.plot(steps, rates, label=str(position))
    acceptance.set(title="Acceptance by draft position", xlabel="step", ylim=(0, 1))
    acceptance.legend(frameon=False, ncols=2)
    length.plot(steps, table[:, 4])
    length.set(title="Expected accepted length", xlabel="step")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
