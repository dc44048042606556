# SPDX-License-Identifier: Apache-2.0
"""The sections of `stratakv bench offload`, their sizes, and the gates of their ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...engine.models.spec.spec_parser import load_model_spec
from ...tiers.settings.values import ConfigError
from ..harness.gate import Gate
from ..harness.report import chosen

PHASES = "phases"  # time to the first token, over HTTP
NO_HIT, WORST_CASE, CONVOY, STREAMING = "no_hit", "worst_case", "convoy", "streaming"
HYBRID = "hybrid"  # time to the first token of a hybrid model
COSTS = (NO_HIT, WORST_CASE, CONVOY, STREAMING, HYBRID)  # sections without a server
SECTIONS = (PHASES, *COSTS)

GATES: Mapping[str, Gate] = {
    "no_hit_throughput": Gate(least=0.97),
    "no_hit_throughput_wall": Gate(least=0.97),
    "no_hit_throughput_writing_all": Gate(least=0.97),  # with all blocks admitted to the SSD
    "worst_case": Gate(least=0.95),
    "worst_case_wall": Gate(least=0.95),
    "convoy": Gate(least=1.5),
    "ttft_cold_over_cpu_hybrid": Gate(least=10.0),
    "step_time_while_streaming": Gate(most=1.05),
    "step_cpu_while_streaming": Gate(most=1.05),
}
# A worst_case cell with a ratio below this value takes more pairs: the lowest of two dozen medians
# is below the true ratio by the scatter (0.008 with 15 pairs).
NEAR_WORST_CASE = 0.97
# Percentage of hits → (pairs with hits, consecutive pairs of a window).
MIXES: Mapping[int, tuple[int, int]] = {0: (0, 2), 20: (1, 5), 50: (1, 2), 80: (4, 5)}
NORMAL, SLOW = "normal", "slow"
SPEEDS = (NORMAL, SLOW)
TIMES_SLOWER = 100
SUFFIX_TOKENS = 32
WORST_CASE_OUTPUT = 8
STREAMING_OUTPUT = 4


@dataclass(frozen=True, slots=True)
class CostScale:
    """The numbers of tokens, requests and pairs in each section."""

    pairs: int
    warm_up: int  # uncounted pairs before the measured pairs
    processes: int  # processes that measure no_hit, one after the other
    more_pairs: int  # additional pairs of worst_case cells near the gate
    # The least number of blocks of a CPU tier above an SSD. A quarter of the tier is one batch,
    # which costs a commit, so a tiny tier would cost more than a tier of usual size.
    slab_blocks: int
    # no_hit: the number of unique prompts at the same time.
    requests: int
    prompt_tokens: int
    output_tokens: int
    # worst_case: prefix length → requests of a pair, one after the other, enough to time.
    prefixes: Mapping[int, int]
    mixes: tuple[int, ...]
    # convoy: the number of requests at the same time with one common prefix.
    convoy_requests: int
    convoy_prefix: int
    convoy_output: int
    # streaming: the number of tokens of a step.
    step_tokens: int
    long_prompts: int
    long_prompt_tokens: int
    # hybrid: the length of a request's prefix.
    hybrid_prefix: int


FULL_COSTS = CostScale(
    pairs=15, warm_up=2, processes=3, more_pairs=30, slab_blocks=1024,
    requests=16, prompt_tokens=512, output_tokens=32,
    prefixes={256: 4, 1000: 2, 3000: 1}, mixes=tuple(MIXES),
    convoy_requests=8, convoy_prefix=3000, convoy_output=16,
    step_tokens=256, long_prompts=6, long_prompt_tokens=1024,
    hybrid_prefix=3600,
)  # fmt: skip
QUICK_COSTS = CostScale(
    pairs=3, warm_up=1, processes=1, more_pairs=0, slab_blocks=128,
    requests=6, prompt_tokens=256, output_tokens=8,
    prefixes={256: 1}, mixes=(0, 50),
    convoy_requests=8, convoy_prefix=1000, convoy_output=4,
    step_tokens=128, long_prompts=3, long_prompt_tokens=512,
    hybrid_prefix=1008,
)  # fmt: skip


def num_pairs(sections: Sequence[str], scale: CostScale) -> int:
    """Return the number of all pairs, with warm-up pairs, without the additional pairs of cells."""
    usual = scale.warm_up + scale.pairs
    mixes = sum(scale.warm_up + pairs_of(mix, scale) for mix in scale.mixes)
    worst_case = len(scale.prefixes) * len(SPEEDS) * mixes
    no_hit = 2 * scale.processes * usual
    runs = {
        NO_HIT: no_hit,
        WORST_CASE: worst_case,
        CONVOY: 2 * usual,
        STREAMING: usual,
        HYBRID: 2 * usual,
    }
    return sum(runs[name] for name in sections)


def pairs_of(mix: int, scale: CostScale) -> int:
    """Return the pairs for a mix of hits, with as many windows as other sections have pairs."""
    _, window = MIXES[mix]
    return scale.pairs + window - 1


def chosen_sections(text: str | None, quick: bool) -> list[str]:
    """The chosen sections, in the order of a run. Raises ConfigError for unknown names."""
    return chosen("--sections", PHASES if text is None and quick else text, SECTIONS)


def check_context(model: Path, sections: Sequence[str], scale: CostScale) -> None:
    """Raise ConfigError if the model's context is too short for the sections without a server."""
    longest = {
        NO_HIT: scale.prompt_tokens + scale.output_tokens,
        WORST_CASE: max(scale.prefixes) + SUFFIX_TOKENS + WORST_CASE_OUTPUT,
        CONVOY: scale.convoy_prefix + SUFFIX_TOKENS + scale.convoy_output,
        STREAMING: scale.long_prompt_tokens + STREAMING_OUTPUT,
    }
    needed = max((longest[name] for name in sections if name != HYBRID), default=0)
    has = load_model_spec(model).max_context
    if has < needed:
        raise ConfigError(
            f"--model {model} has a context of {has} tokens and the sections {', '.join(sections)} "
            f"take {needed}; use --sections {PHASES}"
        )
