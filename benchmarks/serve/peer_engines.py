# SPDX-License-Identifier: Apache-2.0
"""`--peer-python` of `stratakv bench serve`: vLLM's CPU build and StrataKV's engine in turn.

prefill      tokens per second of one prompt
decode_N     tokens per second of N requests, after each request has its first token
again        tokens per second of the prompt of `prefill`, sent again and found in the pool

The two engines have the same number type, number of threads and prompts, and sample greedily. A
ratio is StrataKV's rate over vLLM's rate, the median of the rounds. For a case of two dense models,
the ratio is the lower one. A model with experts has its own ratios, `peer_experts_N`."""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ...engine.config.engine_options import EMBEDDED_MODEL
from ...tiers.settings.values import ConfigError
from ..core.vllm_cases import interpreter
from ..harness import plots
from ..harness.gate import Gate
from ..harness.peer import Child, PeerFailed
from ..harness.report import Report, median, print_table, ratios, run_and_tell
from . import phases_process

FLAG = "--peer-python"
START_SECONDS, ANSWER_SECONDS = 600.0, 600.0
EMBEDDED = "embedded"
CASES = ("prefill", "decode_1", "decode_16", "decode_64", "again")
OF_EXPERTS = {f"decode_{count}": f"peer_experts_{count}" for count in (1, 16, 64)}
GATES = {f"peer_{case}": Gate(least=1.0 if case == "again" else 1.2) for case in CASES} | {
    name: Gate(least=1.2) for name in OF_EXPERTS.values()
}
BLOCK_TOKENS, MOST_REQUESTS, STEP_TOKENS = 32, 64, 2048
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
# The shape of Qwen3-0.6B.
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rope_theta": 1000000, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False,
    "bos_token_id": 151643, "eos_token_id": 151645, "torch_dtype": "bfloat16",
}  # fmt: skip


# A small model in the shape of Qwen3-MoE: each token uses four of 32 experts.
QWEN_EXPERTS: dict[str, Any] = QWEN | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 32000,
    "num_hidden_layers": 8, "num_key_value_heads": 4, "head_dim": 64, "moe_intermediate_size": 384,
    "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "torch_dtype": "float32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, and the sizes of its prompts and answers."""

    name: str
    config: Mapping[str, Any] | None  # config.json for random weights; None for the embedded model
    dtype: str
    vocab_size: int
    context: int
    prompt_tokens: int  # of the cases `prefill` and `again`
    decode_prompt_tokens: int
    decode_tokens: Mapping[int, int]  # number of requests → tokens after the first

    def ratio_of(self, case: str) -> str | None:
        """Return the name of the ratio that includes a case; None if no ratio includes the case."""
        has_experts = self.config is not None and "num_experts" in self.config
        return OF_EXPERTS.get(case) if has_experts else f"peer_{case}"


def subjects(is_quick: bool) -> tuple[Subject, ...]:
    """Return all models. The bfloat16 model has few tokens, because vLLM's build takes seconds for
    a bfloat16 step on a processor without bfloat16 units."""
    if is_quick:
        return (
            Subject(EMBEDDED, None, "float32", 4096, 4096, 3600, 64, {1: 64, 16: 32, 64: 16}),
            Subject(
                "qwen3-0.6b shape", QWEN, "bfloat16", 151936, 1024, 64, 2, {1: 6, 16: 2, 64: 1}
            ),
            Subject(
                "qwen3-moe shape", QWEN_EXPERTS, "float32", 32000, 1024, 64, 8, {1: 8, 16: 4, 64: 2}
            ),
        )
    return (
        Subject(EMBEDDED, None, "float32", 4096, 4096, 3600, 64, {1: 256, 16: 128, 64: 64}),
        Subject("qwen3-0.6b shape", QWEN, "bfloat16", 151936, 1024, 512, 8, {1: 24, 16: 8, 64: 4}),
        Subject(
            "qwen3-moe shape", QWEN_EXPERTS, "float32", 32000, 1024, 512, 8, {1: 48, 16: 24, 64: 12}
        ),
    )


class Engine(Child):
    """An engine in its own process. Raises ConfigError if `python` cannot be run."""

    def __init__(self, python: str | None, log: Path, name: str) -> None:
        try:
            self.version = ""
            # The Python with vLLM has no StrataKV, so it runs the module as a file.
            words = [phases_process.__file__] if python else ["-m", phases_process.__name__]
            super().__init__(words, log, name, python)
        except OSError as error:
            raise ConfigError(f"{FLAG} {python} cannot be run: {error.strerror}") from error

    def begin(self, engine: str, threads: int, arguments: Mapping[str, Any]) -> None:
        """Start the engine. Must be the first call."""
        environment = VLLM_ENVIRONMENT | {
            "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"
        }  # fmt: skip
        self.send(
            {
                "engine": engine,
                "environment": environment if engine == "vllm" else {},
                "threads": threads,
                "arguments": arguments,
            }
        )

    def wait_ready(self) -> None:
        """Wait until the engine is ready; store its version in `version`. Raises PeerFailed."""
        self.version = self.read(START_SECONDS)["version"]

    def answer(
        self, prompts: Sequence[list[int]], max_tokens: int, *, forget: bool = True
    ) -> dict[str, Any]:
        """Run `phases_process.answer` in the child; return the result. Raises PeerFailed."""
        self.send({"prompts": list(prompts), "max_tokens": max_tokens, "forget": forget})
        return self.read(ANSWER_SECONDS)


def make_model(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a checkpoint of random weights in the shape of `config`, with tensors per expert."""
    import torch
    from safetensors.torch import save_file

    from ...engine.models.checkpoint.tensor_shapes import NORM, expected_tensors
    from ...engine.models.spec.spec_parser import load_model_spec

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    dtype = getattr(torch, config["torch_dtype"])
    draw = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape, dtype=dtype)
        if len(shape) == 1
        else torch.empty(shape, dtype=dtype).uniform_(-0.04, 0.04, generator=draw)
        for name, shape in expected_tensors(load_model_spec(folder), [NORM]).items()
    }
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


@dataclass(frozen=True, slots=True)
class Turns:
    """The settings of a run of the two engines."""

    python: str  # the Python with vLLM
    threads: int
    rounds: int
    is_quick: bool
    seed: int


def run_peer(arguments: argparse.Namespace) -> int:
    """Run `--peer-python`; return 0, or 1 after printing an error. Raises ConfigError."""
    for name in ("model", "workload", "requests", "request_rate", "output_tokens"):
        if getattr(arguments, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is of no use beside {FLAG}; leave it out")
    quick = arguments.quick
    rounds = (2 if quick else 5) if arguments.rounds is None else arguments.rounds
    threads = arguments.num_threads
    if threads is None:
        threads = len(os.sched_getaffinity(0))
    for flag, value, most in (("--rounds", rounds, 1000), ("--num-threads", threads, 1024)):
        if not 1 <= value <= most:
            raise ConfigError(f"{flag} takes 1 to {most} here, not {value}")
    python = interpreter(arguments.peer_python, FLAG)
    command = f"stratakv bench serve {FLAG} PYTHON" + " --quick" * quick
    report = Report("serve_peer", command)
    report.figures["plan"] = {"rounds": rounds, "threads": threads, "seed": arguments.seed}
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)

    def measure() -> None:
        with tempfile.TemporaryDirectory(prefix="stratakv-bench-") as scratch:
            turns = Turns(python, threads, rounds, quick, arguments.seed)
            measure_peer(report, turns, Path(scratch), console)

    return run_and_tell(report, arguments.out, measure, print_peer, plot_peer, PeerFailed)


def measure_peer(report: Report, turns: Turns, scratch: Path, console: Console) -> None:
    """Measure all models. Raises PeerFailed, ConfigError."""
    peer = report.figures["peer"] = {"models": {}, "load_average_before": os.getloadavg()}
    for subject in subjects(turns.is_quick):
        folder = EMBEDDED_MODEL
        if subject.config is not None:
            console.print("making a model of random weights")
            make_model(folder := scratch / subject.name.replace(" ", "-"), subject.config)
        console.print(f"starting both engines with {subject.name}")
        with ExitStack() as stack:
            sides = _start(turns, subject, folder, scratch, stack)
            peer["version"] = sides["vllm"].version
            rates, same = _take_rounds(turns, subject, sides, console)
        peer["models"][subject.name] = {
            "dtype": subject.dtype,
            "same_tokens": same,
            "cases": {
                case: {
                    "ours": median(rates["stratakv"][case]),
                    "theirs": median(rates["vllm"][case]),
                    "ratio": median(ratios(rates["stratakv"][case], rates["vllm"][case])),
                    "counts_in": subject.ratio_of(case),
                    "rounds": {side: rates[side][case] for side in rates},
                }
                for case in CASES
            },
        }
    peer["load_average_after"] = os.getloadavg()
    for name in GATES:
        found = [
            case["ratio"]
            for model in peer["models"].values()
            for case in model["cases"].values()
            if case["counts_in"] == name
        ]
        report.ratios[name] = min(found)


def _start(
    turns: Turns, subject: Subject, folder: Path, scratch: Path, stack: ExitStack
) -> dict[str, Engine]:
    """Start and warm up the two engines; return the engines by name."""
    alike = {
        "model": str(folder), "dtype": subject.dtype, "max_model_len": subject.context,
        "max_num_seqs": MOST_REQUESTS, "max_num_batched_tokens": STEP_TOKENS,
    }  # fmt: skip
    theirs = alike | {
        "block_size": BLOCK_TOKENS, "skip_tokenizer_init": True, "enable_prefix_caching": True,
        "enforce_eager": turns.is_quick,  # a quick run does not compile, which takes minutes
    }  # fmt: skip
    sides: dict[str, Engine] = {}
    for name, python, arguments in (
        ("vllm", turns.python, theirs),
        ("stratakv", None, alike | {"num_threads": turns.threads}),
    ):
        log = scratch / f"{name}-{subject.dtype}.log"
        sides[name] = stack.enter_context(Engine(python, log, name))
        sides[name].begin(name, turns.threads, arguments)
    for side in sides.values():
        side.wait_ready()
        side.answer([[5, 6, 7]], 2)  # the first request of a process takes longer
    return sides


Rates = dict[str, dict[str, list[float]]]


def _take_rounds(
    turns: Turns, subject: Subject, sides: Mapping[str, Engine], console: Console
) -> tuple[Rates, float]:
    """Return the rates by engine and case, and the share of answers that the engines agree on."""
    draw = random.Random(turns.seed)
    rates: Rates = {name: {case: [] for case in CASES} for name in sides}
    same: list[bool] = []
    for turn in range(turns.rounds):
        console.print(f"round {turn + 1} of {turns.rounds}")
        # The engine that runs first alternates.
        names = list(sides) if turn % 2 else list(sides)[::-1]
        _take_round(subject, sides, names, draw, rates, same)
        found = {case: rates["stratakv"][case][-1] / rates["vllm"][case][-1] for case in CASES}
        console.print(", ".join(f"{case} {ratio:.2f}" for case, ratio in found.items()))
    return rates, sum(same) / len(same)


def _take_round(
    subject: Subject, sides: Mapping[str, Engine], names: Sequence[str], draw: random.Random,
    rates: Mapping[str, Mapping[str, list[float]]], same: list[bool],
) -> None:  # fmt: skip
    """Measure every case once on each engine, in the order of `names`."""

    def prompt(length: int) -> list[int]:
        return [draw.randrange(3, subject.vocab_size) for _ in range(length)]

    long = prompt(subject.prompt_tokens)
    for case, forget in (("prefill", True), ("again", False)):
        for name in names:
            found = sides[name].answer([long], 1, forget=forget)
            rates[name][case].append(len(long) / found["first_seconds"])
    for count, tokens in subject.decode_tokens.items():
        prompts = [prompt(subject.decode_prompt_tokens) for _ in range(count)]
        answers = []
        for name in names:
            found = sides[name].answer(prompts, tokens + 1)
            if not found["decode_tokens"]:
                raise PeerFailed(f"{name} made no token after every prompt had its first")
            rate = found["decode_tokens"] / found["decode_seconds"]
            rates[name][f"decode_{count}"].append(rate)
            answers.append(found["tokens"])
        same += [one == other for one, other in zip(*answers, strict=True)]


def _gate_of(case: str, found: Mapping[str, Any]) -> Gate | None:
    """Return the gate of a row; None if no ratio includes the row, or in older reports."""
    name = found.get("counts_in", f"peer_{case}")
    return None if name is None else GATES[name]


def print_peer(report: Report) -> None:
    """Print the table of all cases."""
    peer, rows = report.figures["peer"], []
    for name, model in peer["models"].items():
        for case, found in model["cases"].items():
            gate = _gate_of(case, found)
            rows.append(
                [
                    name,
                    case,
                    f"{found['ours']:,.1f}",
                    f"{found['theirs']:,.1f}",
                    f"{found['ratio']:.2f}",
                    "" if gate is None else f"{gate.wanted} {gate.verdict(found['ratio'])}",
                ]
            )
    columns = ("model", "what", "ours tokens/s", "vLLM's tokens/s", "ratio", "gate")
    print_table(f"In turns with vLLM {peer['version']} on this CPU", columns, rows)
    for name, model in peer["models"].items():
        print(f"{name} in {model['dtype']}: {model['same_tokens']:.0%} of the answers are the same")


def plot_peer(report: Report, path: Path) -> Path:
    """Draw StrataKV's rate over vLLM's rate for each case, in a panel for each model."""
    models = report.figures["peer"]["models"]
    figure, panels = plots.new_figure(1, len(models), 2.6)
    for axes, (name, model) in zip(panels[0], models.items(), strict=True):
        ratios = {case: each["ratio"] for case, each in model["cases"].items()}
        gates = {case: _gate_of(case, each) for case, each in model["cases"].items()}
        plots.draw_gated(axes, ratios, gates)
        plots.caption(axes, f"{name}\n{model['dtype']}", "ours over vLLM's")
    plots.add_gate_legend(figure)
    return plots.save_figure(figure, report.environment, path)
