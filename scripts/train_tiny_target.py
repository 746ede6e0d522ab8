"""Remake examples/tiny-kimi-k3: tokenizer and weights, from the Python standard library's own source files.

Runs with no arguments. The weights in the repository took 52 minutes on two cores shared with other work, and end at a
held-out loss of 3.20 nats a token; with both cores free a step takes about 0.7 s, the whole run 35 minutes. They were
made with Python 3.11.7: another version ships other sources and gives another, equally good model.

Text: `split_files()` lists the files. Every 20th of them is held out, never seen by tokenizer or model: later work
measures on those.
"""

import argparse
import json
import math
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny-kimi-k3"
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
HELD_OUT_EVERY = 20

ORDINARY_TOKENS = 2024
SPECIAL_TOKENS = [
    "<|bos|>",
    "<|eos|>",
    "<|media_pad|>",
    "<|mask|>",  # in no text: block drafts fill their empty slots with it
    *(f"<|reserved_{i}|>" for i in range(11)),
    "<|pad|>",
]

SEQUENCE = 512
BATCH = 4
WORKERS = 2  # processes of one thread each: faster on two cores than one process with two threads
WARMUP_STEPS = 60
PEAK_LEARNING_RATE = 3e-3
BALANCE_STEP = 1e-3
SAVE_EVERY = 100


def split_files():
    """(training files, held-out files): lists of Paths under the standard library, each sorted by relative name.

    All `*.py` files except those below SKIPPED_FOLDERS (installed packages, test suites, generated tables) and the
    machine-dependent `_sysconfigdata*`. Files 0, 20, 40, ... of the sorted list are held out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in root.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts) and "_sysconfigdata" not in path.name
    ]
    files.sort(key=lambda path: path.relative_to(root).as_posix())
    held_out = files[::HELD_OUT_EVERY]
    return [path for i, path in enumerate(files) if i % HELD_OUT_EVERY], held_out


def read(path):
    """Text of a source file; bytes that are not UTF-8 are replaced."""
    return path.read_text(encoding="utf-8", errors="replace")


def build_tokenizer(texts):
    """Byte-level BPE of 2024 tokens learned from `texts`, special tokens behind them (ids 2024 to 2039)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ORDINARY_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


def save_tokenizer(tokenizer, folder):
    """Write tokenizer.json and the tokenizer_config.json that AutoTokenizer needs."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 1048576,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def encode(tokenizer, texts):
    """All texts as one stream [N] int64, each between `<|bos|>` and `<|eos|>`, so that the model learns to stop."""
    bos, eos = tokenizer.token_to_id("<|bos|>"), tokenizer.token_to_id("<|eos|>")
    ids = []
    for encoding in tokenizer.encode_batch(texts):
        ids += [bos, *encoding.ids, eos]
    return torch.tensor(ids)


def batches(stream, steps, generator):
    """`steps` batches [up to BATCH, SEQUENCE + 1]: the stream cut anew and shuffled each epoch."""
    produced = 0
    while produced < steps:
        offset = int(torch.randint(SEQUENCE, (1,), generator=generator))
        starts = torch.arange(offset, len(stream) - SEQUENCE - 1, SEQUENCE)
        starts = starts[torch.randperm(len(starts), generator=generator)]
        for chosen in starts.split(BATCH)[: steps - produced]:
            if len(chosen) < WORKERS:  # the end of an epoch may not give every worker a sequence
                continue
            produced += 1
            yield torch.stack([stream[start : start + SEQUENCE + 1] for start in chosen.tolist()])


def next_token_loss(model, batch):
    """Mean cross entropy (nats) of batch [B, T + 1]: each position predicts the next token."""
    logits = model(batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model, stream, pieces=16):
    """Mean cross entropy over `pieces` sequences spread evenly through the held-out stream [N]."""
    model.eval()
    starts = torch.linspace(0, len(stream) - SEQUENCE - 1, pieces).long().tolist()
    losses = [next_token_loss(model, stream[None, start : start + SEQUENCE + 1]).item() for start in starts]
    model.train()
    return sum(losses) / len(losses)


def average_over_workers(tensors):
    """Replace each tensor by its mean over all workers, in place, with one message."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))


def record_loads(model):
    """Count the tokens each expert gets in a forward. Returns the live dict: router -> counts [E] float32."""
    loads = {}

    def record(gate, inputs, outputs):
        loads[gate] = torch.bincount(outputs[0].flatten(), minlength=len(gate.e_score_correction_bias)).float()

    for name, module in model.named_modules():
        if name.endswith("block_sparse_moe.gate"):
            module.register_forward_hook(record)
    return loads


def balance_experts(loads):
    """Nudge the correction bias of busy experts down and of idle ones up, all by the same small step."""
    for gate, load in loads.items():
        gate.e_score_correction_bias.data += BALANCE_STEP * torch.sign(load.mean() - load)


def make_optimizer(parameters):
    """AdamW; weight decay on whatever has two or more dimensions, so not on norms and biases."""
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def learning_rate(step, steps):
    """Linear warm-up, then a cosine down to a fiftieth of the peak."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return PEAK_LEARNING_RATE * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def save_weights(model, folder):
    """Write model.safetensors beside itself first, so that an interrupted save leaves the last good file."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    unfinished = folder / "model.safetensors.tmp"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)  # save_file makes it readable by the owner only
    unfinished.replace(folder / "model.safetensors")


def train(model, stream, held_out, steps, seed, folder):
    """Train on `stream` [N] for `steps` batches shared between the workers; the first one logs and saves."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    text_model = model.language_model.train()  # the vision stub stays as initialised
    parameters = [parameter for parameter in text_model.parameters() if parameter.requires_grad]
    optimizer, loads = make_optimizer(parameters), record_loads(text_model)
    started = time.time()
    for step, batch in enumerate(batches(stream, steps, torch.Generator().manual_seed(seed))):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)  # an expert without tokens still takes part in the average
        loss = next_token_loss(text_model, batch[rank::workers])
        loss.backward()
        loss = loss.detach()
        average_over_workers([*(parameter.grad for parameter in parameters), *loads.values(), loss])
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        balance_experts(loads)
        last = step + 1 == steps
        if rank == 0 and (step % 20 == 0 or last):
            print(
                f"step {step + 1}/{steps}  loss {loss.item():.3f}  {(time.time() - started) / 60:.1f} min", flush=True
            )
        if rank == 0 and ((step + 1) % SAVE_EVERY == 0 or last):
            save_weights(model, folder)
            print(f"saved after step {step + 1}; held-out loss {held_out_loss(text_model, held_out):.3f}", flush=True)


def work(rank, arguments, meeting_point):
    """One worker: the same data and initial weights as every other, its own share of each batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=WORKERS)
    torch.manual_seed(arguments.seed)
    training_files, held_out_files = split_files()
    tokenizer = Tokenizer.from_file(str(arguments.out / "tokenizer.json"))
    stream = encode(tokenizer, [read(path) for path in training_files])
    held_out = encode(tokenizer, [read(path) for path in held_out_files])
    if rank == 0:
        print(f"{len(training_files)} files of {len(stream)} tokens; {len(held_out_files)} of {len(held_out)} held out")
    config = AutoConfig.from_pretrained(EXAMPLE, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    train(model, stream, held_out, arguments.steps, arguments.seed, arguments.out)


def main():
    parser = argparse.ArgumentParser(description="Remake the tiny Kimi K3: tokenizer and weights.")
    parser.add_argument("--out", type=Path, default=EXAMPLE, help="folder to write to (default: the example itself)")
    parser.add_argument("--steps", type=int, default=3000, help=f"batches of {BATCH} x {SEQUENCE} tokens")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(build_tokenizer([read(path) for path in split_files()[0]]), arguments.out)
    # Both workers would copy the model code into the cache at once: load it here first.
    AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(EXAMPLE, trust_remote_code=True), trust_remote_code=True
    )
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(arguments, f"file://{folder}/meet"), nprocs=WORKERS)


if __name__ == "__main__":
    main()
