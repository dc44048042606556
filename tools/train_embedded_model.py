# SPDX-License-Identifier: Apache-2.0
"""Trains the small Llama that ships in engine/models/embedded, on a CPU, in a fixed time.

The learning rate depends on the elapsed share of `--minutes`, so a slow machine trains on fewer
tokens but still ends with a learning rate of zero. Most of the time is for sequences of 512 tokens,
the last part for sequences of 4,096. The result is a Hugging Face folder. The model card and the
licence note are written by hand.

The tool uses neither the engine nor a GPU. `--docs` names a local folder of CPython's RST
sources."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from embedded_model import corpus
from embedded_model.llama import Llama, Shape, evaluate, save_weights, write_atomically
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

SHORT, LONG = 512, 4096
HELD_OUT_SHARE = 0.04
# Tokens of one forward pass, whose values fit into the processor's caches.
PIECE_TOKENS = 2048
# Seconds of `--minutes` that are reserved for the evaluation and the export.
RESERVE_S = 60.0
STEPS_PER_LINE = 25
BEGAN = time.monotonic()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    out = Path(__file__).resolve().parent.parent / "engine" / "models" / "embedded"
    work = Path("embedded-work")
    p = argparse.ArgumentParser(
        description="Train the embedded model on CPython's documentation, in a fixed time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--docs", type=Path, help="CPython's RST sources; without: docstrings only")
    p.add_argument("--minutes", type=float, default=50.0, help="length of the whole run")
    p.add_argument("--work", type=Path, default=work, help="folder for checkpoints and report")
    p.add_argument("--out", type=Path, default=out, help="folder that receives the model")
    p.add_argument("--lr", type=float, default=8e-3, help="peak learning rate")
    p.add_argument("--batch-tokens", type=int, default=LONG, help="tokens per optimiser step")
    p.add_argument("--long-share", type=float, default=0.22, help="share of the time on long text")
    p.add_argument("--checkpoint-minutes", type=float, default=3.0, help="between checkpoints")
    p.add_argument("--threads", type=int, default=2, help="CPU threads")
    p.add_argument("--no-compile", action="store_true", help="never use torch.compile")
    p.add_argument("--resume", action="store_true", help="continue from the checkpoint in --work")
    return p


def checked(p: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; end with a message for values that cannot work."""
    args = p.parse_args()
    if args.docs and not args.docs.is_dir():
        p.error(f"The documentation folder {args.docs} does not exist.")
    if args.minutes < 2:
        p.error("--minutes must be at least 2, because the end of the run needs one of them.")
    if args.batch_tokens < LONG or args.batch_tokens % LONG:
        p.error(f"--batch-tokens must be a multiple of {LONG}.")
    if not 0 < args.lr < 1 or not 0 <= args.long_share < 1:
        p.error("--lr and --long-share must lie between 0 and 1.")
    if args.threads < 1 or args.checkpoint_minutes <= 0:
        p.error("--threads and --checkpoint-minutes must be positive.")
    if args.resume and not (args.work / "checkpoint.safetensors").is_file():
        p.error(f"There is no checkpoint in {args.work} to resume from.")
    return args


class Windows:
    """Endless windows over a token stream; window k depends only on k and the stream."""

    def __init__(self, stream: Tensor, length: int, start: int = 0) -> None:
        if len(stream) < 2 * length + 2:
            raise SystemExit("The training text is too short for one window.")
        self.stream, self.length, self.taken = stream, length, start
        self.epoch, self.starts = -1, torch.empty(0, dtype=torch.long)

    def next(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the next `count` windows, as inputs and targets."""
        per_epoch = (len(self.stream) - 1 - self.length) // self.length
        rows = []
        for number in range(self.taken, self.taken + count):
            epoch, slot = divmod(number, per_epoch)
            if epoch != self.epoch:
                g = torch.Generator().manual_seed(1000 * self.length + epoch)
                # Each epoch shifts the windows, so that windows begin at other tokens.
                shift = int(torch.randint(self.length, (1,), generator=g))
                self.starts = torch.randperm(per_epoch, generator=g) * self.length + shift
                self.epoch = epoch
            at = int(self.starts[slot])
            rows.append(self.stream[at : at + self.length + 1])
        self.taken += count
        block = torch.stack(rows).long()
        return block[:, :-1], block[:, 1:]


def rate(progress: float) -> float:
    """Return the factor of the learning rate at a share of the time: warm-up, then linear to 0."""
    warm = 0.02
    return progress / warm if progress < warm else max(0.0, (1.0 - progress) / (1.0 - warm))


def optimisers(model: Llama, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon, which learns more per token, for the layers' matrices; AdamW for the rest."""
    named = list(model.named_parameters())
    inner = [p for n, p in named if p.dim() == 2 and "embed" not in n]
    embedding = {"params": [p for n, p in named if "embed" in n], "weight_decay": 0.1}
    gains = {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0}
    adam = torch.optim.AdamW([embedding, gains], lr=lr, betas=(0.9, 0.95), eps=1e-10)
    # The option `adjust_lr_fn` scales Muon's steps so that AdamW's learning rate suits Muon.
    muon = torch.optim.Muon(inner, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [adam, muon]


def save_checkpoint(
    path: Path, model: Llama, opts: list[torch.optim.Optimizer], state: dict[str, float]
) -> None:
    """Write weights, optimiser state and counters to one safetensors file."""
    tensors = {f"model/{n}": p.detach().contiguous() for n, p in model.named_parameters()}
    for number, opt in enumerate(opts):
        for index, slots in opt.state_dict()["state"].items():
            for key, value in slots.items():
                tensors[f"opt/{number}/{index}/{key}"] = torch.as_tensor(value).contiguous()
    save_weights(path, tensors, {key: repr(float(value)) for key, value in state.items()})


def load_checkpoint(
    path: Path, model: Llama, opts: list[torch.optim.Optimizer]
) -> dict[str, float]:
    """Restore the weights and optimiser state of a checkpoint; return its counters."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
        state = {key: float(value) for key, value in file.metadata().items()}
    model.load_state_dict({n: tensors[f"model/{n}"] for n, _ in model.named_parameters()})
    for number, opt in enumerate(opts):
        whole = opt.state_dict()
        for name, tensor in tensors.items():
            if name.startswith(f"opt/{number}/"):
                index, key = name.split("/")[2:]
                whole["state"].setdefault(int(index), {})[key] = tensor
        opt.load_state_dict(whole)
    return state


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write indented JSON to a file, which appears complete or not at all."""
    text = json.dumps(content, indent=2) + "\n"
    write_atomically(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def export(out: Path, model: Llama, tokenizer: Tokenizer) -> None:
    """Write the Hugging Face folder; each file is complete when it appears."""
    eos = corpus.end_id(tokenizer)
    ids = {"bos_token_id": eos, "eos_token_id": eos, "pad_token_id": eos}
    context = model.shape.max_position_embeddings
    write_json(out / "config.json", model.shape.hf_config(eos))
    write_json(out / "generation_config.json", {**ids, "do_sample": False})
    write_json(out / "tokenizer_config.json", corpus.tokenizer_config(context))
    write_atomically(out / "tokenizer.json", lambda p: tokenizer.save(str(p), pretty=False))
    save_weights(out / "model.safetensors", model.rounded(), {"format": "pt"})


def encode(tokenizer: Tokenizer, documents: list[corpus.Document]) -> Tensor:
    """Return all documents as one token stream, each between two end tokens."""
    end = corpus.end_id(tokenizer)
    encoded = tokenizer.encode_batch([d.text for d in documents])
    return torch.tensor([end] + [i for e in encoded for i in (*e.ids, end)], dtype=torch.int32)


def prepare(args: argparse.Namespace) -> tuple[Tokenizer, Tensor, Tensor, int]:
    """Return the tokenizer, the training and held-out streams, and the held-out text's bytes."""
    train, held = corpus.gather(args.docs, HELD_OUT_SHARE)
    if not args.docs:
        print("No --docs folder: only the standard library's docstrings are used.", flush=True)
    kept = args.work / "tokenizer.json"
    if args.resume:
        tokenizer = Tokenizer.from_file(str(kept))
    else:
        tokenizer = corpus.train_tokenizer(train, Shape.vocab_size)
        write_atomically(kept, lambda beside: tokenizer.save(str(beside)))
    streams, sizes = [], []
    for name, documents in (("train", train), ("held out", held)):
        streams.append(encode(tokenizer, documents))
        sizes.append(sum(len(d.text.encode()) for d in documents))
        what = f"{len(documents)} documents, {sizes[-1]} bytes, {len(streams[-1])} tokens"
        print(f"{name}: {what}", flush=True)
    return tokenizer, streams[0], streams[1], sizes[1]


def gradients(model: Llama, loss_of: Callable[..., Tensor], windows: Windows, tokens: int) -> float:
    """Sum the gradients of one batch, piece by piece, and clip the sum; return the mean loss."""
    rows = max(1, PIECE_TOKENS // windows.length)
    pieces = tokens // (rows * windows.length)
    total = 0.0
    for _ in range(pieces):
        ids, targets = windows.next(rows)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(ids, targets)
        torch.autograd.backward(loss / pieces)
        total += loss.item() / pieces
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return total


def compiled(model: Llama, args: argparse.Namespace) -> Callable[..., Tensor]:
    """Return the model's forward pass, compiled (about 1.5 times as fast) if a C++ compiler
    exists."""
    if args.no_compile or not shutil.which(os.environ.get("CXX", "g++")):
        print("torch.compile is not used.", flush=True)
        return model
    return torch.compile(model, dynamic=False)


def train(
    args: argparse.Namespace, model: Llama, stream: Tensor, snapshot: Callable[[], None]
) -> dict[str, float]:
    """Train until the time is over and the learning rate is zero; return the counters."""
    opts, path = optimisers(model, args.lr), args.work / "checkpoint.safetensors"
    state = dict.fromkeys(("tokens", "steps", "short", "long"), 0.0)
    state["elapsed"] = time.monotonic() - BEGAN
    if args.resume:
        state = load_checkpoint(path, model, opts)
    loss_of = compiled(model, args)
    short = Windows(stream, SHORT, int(state["short"]))
    long = Windows(stream, LONG, int(state["long"]))
    budget, mean = args.minutes * 60 - RESERVE_S, 0.0
    last = saved = time.monotonic()
    while (progress := state["elapsed"] / budget) < 1.0:
        for group in (group for opt in opts for group in opt.param_groups):
            group["lr"] = args.lr * rate(progress)
        windows = long if progress > 1 - args.long_share else short
        loss = gradients(model, loss_of, windows, args.batch_tokens)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        now = time.monotonic()
        took, last = now - last, now
        state["elapsed"] += took
        state["tokens"] += args.batch_tokens
        state["steps"] += 1
        state["short"], state["long"] = short.taken, long.taken
        mean = 0.9 * mean + 0.1 * loss if mean else loss
        if state["steps"] % STEPS_PER_LINE == 0:
            speed = args.batch_tokens / took
            print(progress_line(state, windows.length, mean, speed, budget), flush=True)
        if now - saved > args.checkpoint_minutes * 60:
            save_checkpoint(path, model, opts, state)
            snapshot()
            saved = now
    save_checkpoint(path, model, opts, state)
    return state


def progress_line(
    state: dict[str, float], length: int, loss: float, speed: float, budget: float
) -> str:
    """Return a line for the log: counters, loss, speed and the remaining time."""
    left = max(0.0, budget - state["elapsed"]) / 60
    return (
        f"step {state['steps']:.0f} length {length} loss {loss:.3f} "
        f"tokens {state['tokens'] / 1e6:.2f}M {speed:.0f} tokens/s ETA {left:.1f} min"
    )


def main() -> None:
    """Prepare the text, train the model, export and evaluate it."""
    args = checked(parser())
    torch.set_num_threads(args.threads)
    tokenizer, stream, held, held_bytes = prepare(args)
    model = Llama(Shape(vocab_size=tokenizer.get_vocab_size()))
    print(f"{model.count()} parameters, ready after {time.monotonic() - BEGAN:.0f} s", flush=True)
    state = train(args, model, stream, lambda: export(args.out, model, tokenizer))
    export(args.out, model, tokenizer)
    report = {
        "parameters": model.count(),
        "train_tokens": len(stream),
        "tokens_seen": int(state["tokens"]),
        "steps": int(state["steps"]),
        "seconds": round(state["elapsed"]),
        "peak_lr": args.lr,
        **evaluate(model, held, held_bytes),
    }
    write_json(args.work / "report.json", report)
    print(json.dumps(report, indent=2), flush=True)


if __name__ == "__main__":
    main()
