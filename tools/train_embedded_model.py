# SPDX-License-Identifier: Apache-2.0
"""Trains the small Llama that ships in engine/models/embedded, on a CPU, in a fixed time.

The run is planned by the wall clock: the learning rate follows the elapsed share of
`--minutes`, so a slow machine sees fewer tokens but still ends fully annealed. Most
of the time goes to sequences of 512 tokens, the last part to 4,096. The result is a
normal Hugging Face folder. The model card and the licence note are written by hand.

What it does not know: the engine, its cache, GPUs, and where documentation comes
from; `--docs` names a folder of CPython's RST sources that is already on the disk.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from embedded_model import corpus
from embedded_model.llama import Llama, Shape
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

SHORT, LONG = 512, 4096
HELD_OUT_SHARE = 0.04
BUCKETS = ((0, 512), (512, 1024), (1024, 2048), (2048, 4096))
# Time kept back at the end for the evaluation and the export.
RESERVE_S = 60.0
BEGAN = time.monotonic()


def arguments() -> argparse.Namespace:
    """Read and check the command line."""
    default_out = Path(__file__).resolve().parent.parent / "engine" / "models" / "embedded"
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--docs", type=Path, help="folder with CPython's RST sources; without it only docstrings are used")
    p.add_argument("--minutes", type=float, default=50.0, help="wall-clock length of the whole run (default 50)")
    p.add_argument("--work", type=Path, default=Path("embedded-work"), help="folder for checkpoints and the report")
    p.add_argument("--out", type=Path, default=default_out, help="folder that receives the model")
    p.add_argument("--lr", type=float, default=8e-3, help="peak learning rate (default 0.008)")
    p.add_argument("--batch-tokens", type=int, default=4096, help="tokens per optimiser step (default 4096)")
    p.add_argument("--long-share", type=float, default=0.22, help="share of the time on 4,096 tokens (default 0.22)")
    p.add_argument("--checkpoint-minutes", type=float, default=3.0, help="time between checkpoints (default 3)")
    p.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    p.add_argument("--no-compile", action="store_true", help="do not use torch.compile, which needs a C++ compiler")
    p.add_argument("--resume", action="store_true", help="continue from the checkpoint in --work")
    args = p.parse_args()
    if args.docs and not args.docs.is_dir():
        p.error(f"The documentation folder {args.docs} does not exist.")
    if args.minutes < 2:
        p.error("--minutes must be at least 2, because the end of the run needs one minute.")
    if args.batch_tokens < LONG or args.batch_tokens % LONG:
        p.error(f"--batch-tokens must be a multiple of {LONG}.")
    if not 0 < args.lr < 1 or not 0 <= args.long_share < 1 or args.threads < 1:
        p.error("--lr and --long-share must lie between 0 and 1, and --threads must be at least 1.")
    if args.resume and not (args.work / "checkpoint.safetensors").is_file():
        p.error(f"There is no checkpoint in {args.work} to resume from.")
    return args


class Windows:
    """Endless windows over a token stream; the k-th window depends on nothing but k and the seed."""

    def __init__(self, stream: Tensor, length: int, start: int = 0) -> None:
        if len(stream) < 2 * length + 2:
            raise SystemExit("The training text is too short for one window.")
        self.stream, self.length, self.taken = stream, length, start
        self.epoch, self.starts = -1, torch.empty(0, dtype=torch.long)

    def next(self, count: int) -> tuple[Tensor, Tensor]:
        """The next `count` windows as inputs and targets."""
        per_epoch = (len(self.stream) - 1 - self.length) // self.length
        rows = []
        for _ in range(count):
            epoch, slot = divmod(self.taken, per_epoch)
            if epoch != self.epoch:
                g = torch.Generator().manual_seed(1000 * self.length + epoch)
                shift = int(torch.randint(self.length, (1,), generator=g))
                self.starts = torch.randperm(per_epoch, generator=g) * self.length + shift
                self.epoch = epoch
            at = int(self.starts[slot])
            rows.append(self.stream[at : at + self.length + 1])
            self.taken += 1
        block = torch.stack(rows).long()
        return block[:, :-1], block[:, 1:]


def rate(progress: float) -> float:
    """Learning-rate factor for an elapsed share of the time: short warm-up, then linear to zero."""
    warm = 0.02
    return progress / warm if progress < warm else max(0.0, (1.0 - progress) / (1.0 - warm))


def optimisers(model: Llama, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, which learns more per token; AdamW for the rest."""
    named = list(model.named_parameters())
    inner = [p for n, p in named if p.dim() == 2 and "embed" not in n]
    embed = [p for n, p in named if "embed" in n]
    gains = [p for _, p in named if p.dim() == 1]
    groups = [{"params": embed, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-10)
    muon = torch.optim.Muon(inner, lr=lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    return [adam, muon]


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Write beside the target, then rename, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    write(beside)
    # The safetensors writer leaves files that only their owner can read.
    beside.chmod(0o644)
    os.replace(beside, path)


def save_checkpoint(path: Path, model: Llama, opts: list[torch.optim.Optimizer], state: dict[str, float]) -> None:
    """Weights, optimiser state and counters in one safetensors file."""
    tensors = {f"model/{n}": p.detach().contiguous() for n, p in model.named_parameters()}
    for number, opt in enumerate(opts):
        for index, slots in opt.state_dict()["state"].items():
            for key, value in slots.items():
                tensors[f"opt/{number}/{index}/{key}"] = torch.as_tensor(value).contiguous()
    meta = {key: repr(float(value)) for key, value in state.items()}
    write_atomically(path, lambda p: save_file(tensors, p, metadata=meta))


def load_checkpoint(path: Path, model: Llama, opts: list[torch.optim.Optimizer]) -> dict[str, float]:
    """Restore what `save_checkpoint` wrote; returns the counters."""
    from safetensors import safe_open

    tensors = load_file(path)
    weights = {n.removeprefix("model/"): t for n, t in tensors.items() if n.startswith("model/")}
    model.load_state_dict(weights)
    for number, opt in enumerate(opts):
        whole = opt.state_dict()
        for name, tensor in tensors.items():
            if name.startswith(f"opt/{number}/"):
                index, key = name.split("/")[2:]
                whole["state"].setdefault(int(index), {})[key] = tensor
        opt.load_state_dict(whole)
    with safe_open(path, "pt") as f:
        return {key: float(value) for key, value in (f.metadata() or {}).items()}


def export(out: Path, model: Llama, tokenizer: Tokenizer) -> None:
    """Write the Hugging Face folder; every file appears by a rename."""
    eos = tokenizer.token_to_id(corpus.END)
    texts: dict[str, Any] = {
        "config.json": model.shape.hf_config(eos),
        "generation_config.json": {"bos_token_id": eos, "eos_token_id": eos, "pad_token_id": eos, "do_sample": False},
        "tokenizer_config.json": corpus.tokenizer_config(model.shape.max_position_embeddings),
    }
    for name, content in texts.items():
        text = json.dumps(content, indent=2) + "\n"
        write_atomically(out / name, lambda p, text=text: p.write_text(text, encoding="utf-8") and None)
    write_atomically(out / "tokenizer.json", lambda p: tokenizer.save(str(p), pretty=False))
    weights = {n: p.detach().bfloat16().contiguous() for n, p in model.named_parameters()}
    write_atomically(out / "model.safetensors", lambda p: save_file(weights, p, metadata={"format": "pt"}))


def evaluate(model: Llama, stream: Tensor, text_bytes: int) -> dict[str, Any]:
    """Held-out bits per byte, and the loss per token by position, over windows of 4,096."""
    rounded = Llama(model.shape)
    # The exported numbers are bfloat16, so the evaluation uses the same rounded weights.
    rounded.load_state_dict({n: p.detach().bfloat16().float() for n, p in model.named_parameters()}, strict=False)
    total, full = 0.0, []
    with torch.no_grad():
        for at in range(0, len(stream) - 1, LONG):
            ids = stream[at : at + LONG + 1].long()[None]
            loss = rounded(ids[:, :-1], ids[:, 1:], reduction="none")[0]
            total += loss.double().sum().item()
            if len(loss) == LONG:
                full.append(loss)
    by_position = torch.stack(full).mean(0) if full else torch.empty(0)
    return {
        "held_out_bits_per_byte": total / math.log(2) / text_bytes,
        "held_out_nats_per_token": total / (len(stream) - 1),
        "held_out_tokens": len(stream),
        "held_out_bytes": text_bytes,
        "nats_by_position": {f"{a}-{b}": by_position[a:b].mean().item() for a, b in BUCKETS if full},
    }


def prepare(args: argparse.Namespace) -> tuple[Tokenizer, Tensor, Tensor, int]:
    """Text, tokenizer and the two token streams; a resumed run keeps its tokenizer."""
    train, held = corpus.gather(args.docs, HELD_OUT_SHARE)
    if not args.docs:
        print("No --docs folder: only the standard library's docstrings are used.", flush=True)
    kept = args.work / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(kept)) if args.resume else corpus.train_tokenizer(train, Shape.vocab_size)
    write_atomically(kept, lambda p: tokenizer.save(str(p)))
    end = tokenizer.token_to_id(corpus.END)
    streams = []
    for documents in (train, held):
        encoded = tokenizer.encode_batch([d.text for d in documents])
        ids = [end] + [token for e in encoded for token in (*e.ids, end)]
        streams.append(torch.tensor(ids, dtype=torch.int32))
    sizes = [sum(len(d.text.encode()) for d in documents) for documents in (train, held)]
    for name, documents, size, stream in zip(("train", "held out"), (train, held), sizes, streams, strict=True):
        print(f"{name}: {len(documents)} documents, {size} bytes, {len(stream)} tokens", flush=True)
    return tokenizer, streams[0], streams[1], sizes[1]


def step(model: Llama, loss_of: Callable[..., Tensor], windows: Windows, tokens: int) -> float:
    """Accumulate the gradients of one batch in small pieces that fit the processor's caches."""
    piece = max(1, 2048 // windows.length)
    pieces = tokens // (piece * windows.length)
    total = 0.0
    for _ in range(pieces):
        ids, targets = windows.next(piece)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(ids, targets)
        (loss / pieces).backward()
        total += loss.item() / pieces
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return total


def train(args: argparse.Namespace, model: Llama, stream: Tensor, snapshot: Callable[[], None]) -> dict[str, float]:
    """Run until the clock says that the learning rate is zero; returns the counters."""
    opts = optimisers(model, args.lr)
    path = args.work / "checkpoint.safetensors"
    state = {"elapsed": time.monotonic() - BEGAN, "tokens": 0.0, "steps": 0.0, "short": 0.0, "long": 0.0}
    if args.resume:
        state = load_checkpoint(path, model, opts)
    loss_of = model if args.no_compile else torch.compile(model, dynamic=False)
    short = Windows(stream, SHORT, int(state["short"]))
    long = Windows(stream, LONG, int(state["long"]))
    budget, last, saved = args.minutes * 60 - RESERVE_S, time.monotonic(), time.monotonic()
    mean, shown = 0.0, state["steps"]
    while (progress := state["elapsed"] / budget) < 1.0:
        windows = long if progress > 1 - args.long_share else short
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = args.lr * rate(progress)
        loss = step(model, loss_of, windows, args.batch_tokens)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        now = time.monotonic()
        took, last = now - last, now
        state["elapsed"] += took
        state["tokens"] += args.batch_tokens
        state["steps"] += 1
        state["short"], state["long"] = short.taken, long.taken
        mean = loss if mean == 0 else 0.9 * mean + 0.1 * loss
        if state["steps"] >= shown + 25:
            shown = state["steps"]
            print(
                f"step {shown:.0f} length {windows.length} loss {mean:.3f} tokens {state['tokens'] / 1e6:.2f}M "
                f"{args.batch_tokens / took:.0f} tokens/s lr {args.lr * rate(progress):.5f} "
                f"ETA {max(0.0, budget - state['elapsed']) / 60:.1f} min",
                flush=True,
            )
        if now - saved > args.checkpoint_minutes * 60:
            save_checkpoint(path, model, opts, state)
            snapshot()
            saved = time.monotonic()
    save_checkpoint(path, model, opts, state)
    return state


def main() -> None:
    """Prepare, train, export and evaluate."""
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    tokenizer, stream, held, held_bytes = prepare(args)
    model = Llama(Shape(vocab_size=tokenizer.get_vocab_size()))
    print(f"{model.count()} parameters, ready after {time.monotonic() - BEGAN:.0f} s", flush=True)
    state = train(args, model, stream, lambda: export(args.out, model, tokenizer))
    export(args.out, model, tokenizer)
    report = {
        "parameters": model.count(),
        "tokens_seen": int(state["tokens"]),
        "train_tokens": len(stream),
        "steps": int(state["steps"]),
        "seconds_training": round(state["elapsed"]),
        "peak_lr": args.lr,
        **evaluate(model, held, held_bytes),
    }
    text = json.dumps(report, indent=2) + "\n"
    write_atomically(args.work / "report.json", lambda p: p.write_text(text, encoding="utf-8") and None)
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
