"""A Qwen3 toy and a DSpark draft for it, made in minutes and kept under build/: what `benchmark.py` compares with.

A plain decoder of the tiny Kimi K3's vocabulary, trained briefly on the same text and then distilled by the project's
own scripts. It writes worse Python than the tiny Kimi K3, and more of it repeats.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from common import BUILD, TINY_DRAFT, TINY_TARGET, load_target
from regenerate import passages, regenerate
from tokenizers import Tokenizer
from tqdm import tqdm
from train_tiny_target import batches, encode, learning_rate, next_token_loss, read, split_files
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

TARGET, DRAFT = BUILD / "qwen3-toy", BUILD / "qwen3-toy-dspark"
TEXT, DRAFT_CONFIG = BUILD / "qwen3-toy-text.jsonl", BUILD / "qwen3-toy-dspark.json"
TARGET_STEPS = 300
TEXT_ARGUMENTS = dict(samples=2048, max_new_tokens=128, temperatures=[0.0, 1.0], batch_size=128, seed=0)
DRAFT_ARGUMENTS = ("--steps", "600", "--anchors", "64", "--warmup-steps", "30")


def make_pair() -> tuple[Path, Path]:
    """Folders of the toy and its draft; what an earlier call has made stays as it is."""
    if not (TARGET / "config.json").exists():
        print(f"Training the Qwen3 toy for {TARGET_STEPS} steps (kept in {TARGET}).", file=sys.stderr)
        train_target()
    if not TEXT.exists():
        print("Letting it write the text to distil its draft from.", file=sys.stderr)
        target, tokenizer = load_target(TARGET)
        arguments = argparse.Namespace(out=TEXT, **TEXT_ARGUMENTS)
        regenerate(target, passages(tokenizer, split_files()[0], arguments.samples, arguments.seed), arguments)
    if not (DRAFT / "model.safetensors").exists():
        print(f"Distilling its draft (kept in {DRAFT}).", file=sys.stderr)
        DRAFT_CONFIG.write_text(json.dumps(draft_config(), indent=2) + "\n", "utf-8")
        files = ("--target", TARGET, "--draft-config", DRAFT_CONFIG, "--data", TEXT, "--out", DRAFT)
        script = Path(__file__).with_name("train.py")
        subprocess.run([sys.executable, script, *files, *DRAFT_ARGUMENTS], check=True)
    return TARGET, DRAFT


def train_target() -> None:
    """A Qwen3 of four layers, trained on the standard library's sources; saved with the tiny Kimi K3's tokenizer."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY_TARGET)
    model = Qwen3ForCausalLM(target_config(tokenizer)).train()
    fast = Tokenizer.from_file(str(TINY_TARGET / "tokenizer.json"))
    stream = encode(fast, [read(path) for path in split_files()[0]])
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for step, batch in enumerate(tqdm(batches(stream, TARGET_STEPS, generator), total=TARGET_STEPS, unit="step")):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, TARGET_STEPS)
        loss = next_token_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    unfinished = TARGET.with_name(TARGET.name + ".partial")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(TARGET)


def target_config(tokenizer) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )


def draft_config() -> dict:
    """The tiny Kimi K3's draft, narrowed to the toy."""
    config = json.loads((TINY_DRAFT / "config.json").read_text("utf-8"))
    nested = {**config["dflash_config"], "target_layer_ids": [0, 1, 2, 3], "markov_rank": 64}
    return {
        **config,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_target_layers": 4,
        "markov_rank": 64,
        "dflash_config": nested,
    }
