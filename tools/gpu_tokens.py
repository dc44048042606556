# SPDX-License-Identifier: Apache-2.0
"""Compares a device's tokens with the CPU's, with tiers and without, in CUDA graphs and without.

    python tools/gpu_tokens.py --device cuda|cpu [--out FILE]

The embedded model answers the same prompts in several engines, one after the other. In float64 all
engines must give the CPU's tokens, whether K and V are computed or come from the pool, the cpu tier
or the ssd tier. In bfloat16 a step without a CUDA graph may round differently than a step in a
graph, so the tokens of the two must agree only in part; but blocks from the cpu tier must give the
same tokens as blocks from the pool. The tool prints a line for each check and writes JSON to FILE.
The exit status is 1 if a check is `wrong` or `failed`. StrataKV must be on the Python path.

With `--device cpu`, which tests the tool itself, the CPU versions of the kernels compute, and
checks without a meaning on a CPU are left out."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stratakv.engine.config.engine_options import EMBEDDED_MODEL
from stratakv.engine.llm import LLM
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.text.tokenizer import Tokenizer

PROMPT_TOKENS = 600
# The number of prompts, and of tokens in each answer; small on a CPU, whose kernels are slow.
NUM_PROMPTS, ANSWER_TOKENS = {"cuda": 4, "cpu": 3}, {"cuda": 32, "cpu": 12}
BLOCK_SIZE = 16
# Tokens in whole blocks of a prompt, which the prefix cache can have.
FOUND_TOKENS = PROMPT_TOKENS // BLOCK_SIZE * BLOCK_SIZE
MAX_MODEL_LEN = 1024
ALL_BLOCKS, FEW_BLOCKS = 200, 70  # pool sizes: all prompts fit, or hardly two prompts fit
LEAST_FOUND = 0.9  # least share of the reusable tokens that a tier must provide
LEAST_NEAR = 0.5  # least share of tokens before the first difference
# The engine that chooses its pool's size may use MEMORY_SHARE of the GPU's memory, which other
# processes share. TRIES is the most attempts to start that engine.
MEMORY_SHARE, TRIES = 0.1, 3
OK, WRONG, FAILED, LEFT_OUT = "ok", "wrong", "failed", "left out"


@dataclass
class Check:
    """A check and its result: `wrong` means wrong tokens, `failed` means any other failure."""

    name: str
    result: str
    said: str


@dataclass
class Report:
    """The results; the JSON file is written again after every check."""

    device: str
    path: Path | None = None
    checks: list[Check] = field(default_factory=list)
    seconds: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, result: str, said: object = "") -> None:
        """Add a finished check, print it and write the file."""
        self.checks.append(Check(name, result, str(said)))
        print(f"{result:8}  {name}{f': {said}' if str(said) else ''}", flush=True)
        self.write()

    def write(self) -> None:
        """Write the JSON file, if a path was given."""
        if self.path is not None:
            body = {
                "device": self.device,
                "is_rehearsal": self.device == "cpu",
                "checks": [asdict(each) for each in self.checks],
                "seconds": self.seconds,
            }
            self.path.write_text(json.dumps(body, indent=2) + "\n")

    def attempt(self, name: str, part: Callable[[], None]) -> None:
        """Run a part of the session; record an exception as a failed check."""
        try:
            part()
        except Exception as error:  # noqa: BLE001 - whatever an engine may raise
            words = " ".join(str(error).split())[:300]
            self.add(name, FAILED, f"{type(error).__name__}: {words}")

    def equal(self, name: str, got: Answers, expected: Answers) -> None:
        """Add a check that all tokens are equal."""
        near = agreed(got, expected)
        total = sum(map(len, expected.tokens))
        said = f"{near} of {total} tokens"
        self.add(name, OK if got.tokens == expected.tokens else WRONG, said)

    def near(self, name: str, got: Answers, expected: Answers) -> None:
        """Add a check that at least LEAST_NEAR of the tokens, up to each first difference,
        agree."""
        near, total = agreed(got, expected), sum(map(len, expected.tokens))
        self.add(name, OK if near >= LEAST_NEAR * total else FAILED, f"{near} of {total} tokens")

    def found(self, tier: str, answers: Answers, name: str) -> None:
        """Add a check that LEAST_FOUND of the prompts' reusable tokens came from `tier`."""
        got, most = answers.found[tier], FOUND_TOKENS * len(answers.tokens)
        said = f"{got} of {most} tokens, of all places {dict(answers.found)}"
        self.add(name, OK if got >= LEAST_FOUND * most else FAILED, said)


@dataclass(frozen=True)
class Answers:
    """The answers of one engine to all prompts, in order."""

    tokens: list[list[int]]
    found: Counter[str]  # cached prompt tokens by tier
    cached: list[int]  # cached tokens of each prompt
    seconds: list[float]


def agreed(ones: Answers, others: Answers) -> int:
    """Return the total number of tokens before the first difference in each answer."""
    count = 0
    for one, other in zip(ones.tokens, others.tokens, strict=True):
        for mine, theirs in zip(one, other, strict=False):
            if mine != theirs:
                break
            count += 1
    return count


def make_prompts(count: int) -> list[list[int]]:
    """Return prompts of the same length from the text of LICENSE. All prompts run the same kernels,
    and share no block, because the first blocks differ."""
    root = Path(__file__).resolve().parent.parent
    tokenizer = Tokenizer.load_if_present(EMBEDDED_MODEL)
    assert tokenizer is not None
    ids = tokenizer.encode((root / "LICENSE").read_text(), add_special_tokens=False)
    if len(ids) < count * PROMPT_TOKENS:
        raise SystemExit(
            f"LICENSE has {len(ids)} tokens and {count * PROMPT_TOKENS} are needed; bring the "
            "whole checkout"
        )
    starts = range(0, count * PROMPT_TOKENS, PROMPT_TOKENS)
    return [ids[start : start + PROMPT_TOKENS] for start in starts]


def ask(llm: LLM, prompts: Sequence[list[int]], answer_tokens: int) -> Answers:
    """Send one prompt after the other, so that every engine computes the same batches."""
    params = SamplingParams(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True)
    answers = Answers([], Counter(), [], [])
    for prompt in prompts:
        began = time.perf_counter()
        [output] = llm.generate([prompt], params, use_tqdm=False)
        answers.seconds.append(round(time.perf_counter() - began, 4))
        [choice] = output.outputs
        if choice.error is not None:
            raise RuntimeError(f"a prompt was not answered: {choice.error}")
        answers.tokens.append(list(choice.token_ids))
        answers.found.update(choice.cached_tokens_by_tier)
        answers.cached.append(choice.num_cached_tokens)
    return answers


def open_engine(device: str, **given: Any) -> LLM:
    """Return an engine of the embedded model, for a `with` statement. An option that is None has
    the engine's default."""
    options: dict[str, Any] = {
        "device": device,
        "num_blocks": ALL_BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
    }
    options |= given
    return LLM(**{name: value for name, value in options.items() if value is not None})


def tiers(folder: Path | None = None) -> dict[str, Any]:
    """Return options of an engine with few blocks, a cpu tier and, if there is a `folder`, an ssd
    tier in the folder."""
    found: dict[str, Any] = {
        "num_blocks": FEW_BLOCKS,
        "kv_offload": "cpu" if folder is None else "cpu,ssd",
        "kv_offload_load": "always",
        "kv_offload_cpu_bytes": "64MiB",
    }
    if folder is not None:
        found |= {"kv_offload_ssd_path": str(folder), "kv_offload_ssd_bytes": "256MiB"}
    return found


class Session:
    """The checks on one device."""

    def __init__(self, device: str, report: Report) -> None:
        self.report = report
        self._device = device
        self._is_gpu = device != "cpu"
        self._prompts = make_prompts(NUM_PROMPTS[device])
        # Kernels compute attention also on the CPU, except for the reference (gathered K and V).
        self._float64: dict[str, Any] = {"dtype": "float64", "attention_backend": "kernels"}
        self._bfloat16: dict[str, Any] = {"dtype": "bfloat16", "attention_backend": "kernels"}
        if self._is_gpu:
            # No CUDA graph, because the checks of the float64 kernels read values on the host.
            self._float64 |= {"enforce_eager": True}
            self._bfloat16 |= {"strict_kernels": True}
        self._kept: Answers | None = None  # answers in bfloat16 with blocks from the pool
        self._recorded: Answers | None = None

    def run(self) -> None:
        """Run all parts. A part that needs the answers of a failed part fails too."""
        for name, part in (
            ("float64", self.float64),
            ("bfloat16", self.bfloat16),
            ("bfloat16 with tiers", self.bfloat16_tiers),
            ("fp8 KV", self.fp8),
        ):
            self.report.attempt(name, part)
        if not self._is_gpu:
            why = (
                "a CPU records no steps, its pool is not sized by what a device has left, and no "
                "library computes its chunks"
            )
            name = "recorded as launched; pool by what is left; chunks by a library"
            self.report.add(name, LEFT_OUT, why)
            return
        self.report.attempt("launched", self.launched)
        self.report.attempt("chunks by a library", self.library)
        self.report.attempt("pool by what is left", self.sized)

    def _ask(self, llm: LLM) -> Answers:
        return ask(llm, self._prompts, ANSWER_TOKENS[self._device])

    def float64(self) -> None:
        """Check that float64 gives the CPU's tokens, wherever K and V come from."""
        with open_engine("cpu", dtype="float64", attention_backend="gather") as llm:
            expected = self._ask(llm)
        with open_engine(self._device, **self._float64) as llm:
            self.report.equal("float64: as on the CPU", self._ask(llm), expected)
        with TemporaryDirectory(prefix="gpu-tokens-") as folder:
            options = self._float64 | tiers(Path(folder) / "ssd")
            with open_engine(self._device, **options) as llm:
                self.report.equal("float64: above tiers", self._ask(llm), expected)
                again = self._ask(llm)
            self.report.equal("float64: out of the cpu tier", again, expected)
            self.report.found("cpu", again, "float64: the cpu tier brought the prompts")
            with open_engine(self._device, **options) as llm:
                again = self._ask(llm)
            self.report.equal("float64: out of the ssd tier", again, expected)
            self.report.found("ssd", again, "float64: the ssd tier brought the prompts")

    def bfloat16(self) -> None:
        """Measure the seconds to the answers, and keep the answers for later comparisons. The
        seconds include the compilation of the first bfloat16 kernels of the session."""
        began = time.perf_counter()
        with open_engine(self._device, **self._bfloat16) as llm:
            start = time.perf_counter() - began
            self._recorded = first = self._ask(llm)
            self._kept = second = self._ask(llm)
        compiler = sum(each.seconds[0] - each.seconds[1] for each in (first, second))
        self.report.seconds |= {
            "start": round(start, 2),
            "first_answers": first.seconds,
            "second_answers": second.seconds,
            # Prompts have the same length, so only a round's first waits for the compiler.
            "of_the_compiler": round(compiler, 3),
        }
        self.report.near("bfloat16: out of the pool nearly as computed", second, first)
        said = f"{sum(first.seconds):.2f} and {sum(second.seconds):.2f} s, start {start:.1f} s"
        self.report.add(
            "bfloat16: first and second answers", OK, f"{said}, compiler {compiler:.2f}"
        )

    def bfloat16_tiers(self) -> None:
        """Check that blocks from the cpu tier give the same tokens as blocks from the pool."""
        expected = _needed(self._kept)
        with open_engine(self._device, **self._bfloat16, **tiers()) as llm:
            self._ask(llm)
            again = self._ask(llm)
        self.report.found("cpu", again, "bfloat16: the cpu tier brought the prompts")
        name = "bfloat16: out of the cpu tier as out of the pool"
        if again.cached == expected.cached:
            self.report.equal(name, again, expected)
        else:
            said = f"{again.cached} tokens were cached and {expected.cached} in the pool"
            self.report.add(name, FAILED, said)

    def fp8(self) -> None:
        """Check that a pool of float8 gives whole answers. The number of tokens that agree with
        bfloat16 is only reported, because float8 rounds K and V to 4 significant bits."""
        expected = _needed(self._recorded)
        with open_engine(self._device, **self._bfloat16, kv_cache_dtype="fp8") as llm:
            got = self._ask(llm)
        is_whole = [len(each) for each in got.tokens] == [len(each) for each in expected.tokens]
        said = f"{agreed(got, expected)} tokens as in bfloat16"
        self.report.add("fp8 KV: every answer is whole", OK if is_whole else FAILED, said)

    def launched(self) -> None:
        """Check that steps without CUDA graphs nearly agree with steps in graphs."""
        expected = _needed(self._recorded)
        with open_engine(self._device, **self._bfloat16, enforce_eager=True) as llm:
            got = self._ask(llm)
        self.report.near("bfloat16: launched steps nearly as recorded ones", got, expected)

    def library(self) -> None:
        """Check prompts of one long chunk, with torch's attention over gathered K and V."""
        ones, others = self._prompts[::2], self._prompts[1::2]
        prompts = [one + other for one, other in zip(ones, others, strict=True)]
        options = self._bfloat16 | {
            "max_model_len": 2 * MAX_MODEL_LEN,
            "max_num_batched_tokens": 2 * MAX_MODEL_LEN,
        }
        found = []
        for backend in ("kernels", "sdpa"):
            with open_engine(self._device, **options | {"attention_backend": backend}) as llm:
                found.append(ask(llm, prompts, ANSWER_TOKENS[self._device]))
        expected, got = found
        self.report.near("bfloat16: chunks by a library nearly as by the kernel", got, expected)

    def sized(self) -> None:
        """Check that a pool of the engine's own size is within its share of the device's memory."""
        import torch

        expected = _needed(self._recorded)
        block_bytes = load_model_spec(EMBEDDED_MODEL).layout(BLOCK_SIZE, "bfloat16").slot_bytes
        budget = MEMORY_SHARE * torch.cuda.get_device_properties(0).total_memory
        options = self._bfloat16 | {"num_blocks": None, "gpu_memory_utilization": MEMORY_SHARE}
        for left in reversed(range(TRIES)):
            try:
                with open_engine(self._device, **options) as llm:
                    blocks = int(llm.stats()["core"]["cache_config"]["num_gpu_blocks"])
                    got = self._ask(llm)
                break
            except ValueError:  # other processes may allocate memory meanwhile
                if not left:
                    raise
        size = blocks * block_bytes
        said = f"{blocks} blocks, {size / 2**30:.2f} GiB of {budget / 2**30:.2f}"
        self.report.add("pool by what is left", OK if 0 < size <= budget else FAILED, said)
        self.report.near("pool by what is left: nearly the same answers", got, expected)


def _needed(answers: Answers | None) -> Answers:
    if answers is None:
        raise RuntimeError("there is nothing to compare with, since an earlier part failed")
    return answers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every check; return 1 if one was wrong or failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", type=Path, metavar="FILE", help="for JSON")
    args = parser.parse_args(arguments)
    report = Report(args.device, args.out)
    Session(args.device, report).run()
    bad = [each.name for each in report.checks if each.result in (WRONG, FAILED)]
    if args.device == "cpu":
        print("on the CPU: nothing of this says anything about a GPU")
    print(f"not right: {'; '.join(bad)}" if bad else "every check of the tokens went well")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
