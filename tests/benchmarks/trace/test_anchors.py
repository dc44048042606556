# SPDX-License-Identifier: Apache-2.0
"""Public traces, replayed: the figures that another implementation measured on them.

STRATAKV_TRACES names the folder that holds Mooncake's conversation and synthetic traces of FAST'25
and an agent trace `cc_dev_512` made of WEKA's sessions; they are not part of the project.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from stratakv.benchmarks.trace.command import CAPACITIES_PERCENT
from stratakv.benchmarks.trace.formats import Trace, read_trace, trace_files, trace_name
from stratakv.benchmarks.trace.replay import (
    Arrangement,
    Outcome,
    ReplayTier,
    replay,
    replay_heads_first,
    replay_opt,
    replay_two_tiers,
)
from stratakv.tiers.policies.lru import LruPolicy

from .test_two_tiers import Doorkeeper

FOLDER = os.environ.get("STRATAKV_TRACES")
pytestmark = pytest.mark.skipif(
    not FOLDER, reason="needs public traces; STRATAKV_TRACES names their folder"
)

# Hits and prefill work saved, in percent, at 1, 2, 5, 10, 20 and 50 % of the distinct blocks.
Row = tuple[tuple[float, float], ...]
LRU: dict[str, Row] = {
    "conversation": (
        (5.2, 3.7),
        (7.9, 6.2),
        (19.6, 17.7),
        (27.9, 25.7),
        (34.5, 32.6),
        (36.3, 34.6),
    ),
    "synthetic": ((3.8, 3.7), (7.8, 7.6), (15.7, 15.8), (26.2, 27.5), (39.3, 41.5), (58.9, 61.0)),
    "cc_dev_512": (
        (23.3, 17.7),
        (46.8, 38.2),
        (83.1, 77.4),
        (94.3, 93.0),
        (96.4, 95.7),
        (96.7, 96.0),
    ),
}
HEADS_FIRST: dict[str, Row] = {
    "conversation": (
        (5.2, 3.7),
        (7.9, 6.1),
        (19.5, 17.7),
        (27.8, 25.6),
        (34.5, 32.4),
        (36.3, 34.6),
    ),
    "synthetic": ((3.4, 3.3), (7.6, 7.5), (15.5, 15.6), (26.0, 27.2), (39.1, 41.2), (58.9, 61.0)),
    "cc_dev_512": (
        (15.6, 11.7),
        (40.5, 32.9),
        (79.7, 72.6),
        (94.1, 92.8),
        (96.4, 95.7),
        (96.7, 96.0),
    ),
}
OPT: dict[str, Row] = {
    "conversation": ((24.6, 22.5), (31.4, 29.3), *(((36.6, 34.9),) * 4)),
    "synthetic": (
        (18.5, 18.0),
        (26.1, 25.6),
        (39.6, 41.4),
        (50.6, 52.6),
        (60.8, 62.8),
        (64.0, 65.9),
    ),
    "cc_dev_512": (
        (49.0, 36.6),
        (69.6, 58.5),
        (90.1, 86.8),
        (96.0, 94.9),
        (96.7, 96.0),
        (96.7, 96.0),
    ),
}
INFINITE = {"conversation": (36.6, 34.9), "synthetic": (64.0, 65.9), "cc_dev_512": (96.7, 96.0)}
# Hits of both tiers in percent and blocks written below for each block of a prompt, at 1 over 5,
# 2 over 10 and 5 over 20 %. The last row writes what was asked for twice.
PAIRS = ((1, 5), (2, 10), (5, 20))
TwoRows = dict[tuple[Arrangement, bool], Row]
TWO_TIERS: dict[str, TwoRows] = {
    "conversation": {
        (Arrangement.EXCLUSIVE, False): ((22.1, 0.941), (29.7, 0.908), (35.3, 0.773)),
        (Arrangement.WRITE_THROUGH, False): ((19.6, 0.804), (27.9, 0.721), (34.5, 0.655)),
        (Arrangement.WRITE_BACK, False): ((21.7, 0.777), (29.4, 0.696), (35.3, 0.623)),
        (Arrangement.WRITE_BACK, True): ((20.7, 0.161), (22.8, 0.152), (28.1, 0.146)),
    },
    "synthetic": {
        (Arrangement.EXCLUSIVE, False): ((17.7, 0.958), (28.7, 0.915), (44.4, 0.825)),
        (Arrangement.WRITE_THROUGH, False): ((15.7, 0.843), (26.2, 0.738), (39.3, 0.607)),
        (Arrangement.WRITE_BACK, False): ((17.3, 0.827), (28.1, 0.717), (42.8, 0.567)),
        (Arrangement.WRITE_BACK, True): ((18.1, 0.461), (29.2, 0.352), (42.7, 0.221)),
    },
    "cc_dev_512": {
        (Arrangement.EXCLUSIVE, False): ((87.8, 0.767), (95.1, 0.531), (96.6, 0.168)),
        (Arrangement.WRITE_THROUGH, False): ((83.1, 0.169), (94.3, 0.057), (96.4, 0.036)),
        (Arrangement.WRITE_BACK, False): ((84.4, 0.156), (94.4, 0.056), (96.5, 0.034)),
        (Arrangement.WRITE_BACK, True): ((83.0, 0.142), (92.9, 0.051), (96.0, 0.032)),
    },
}
ROUNDING = 0.0501  # anchors have one decimal


@cache
def real(name: str) -> Trace:
    files = {trace_name(path): path for path in trace_files([Path(str(FOLDER))])}
    assert name in files, f"STRATAKV_TRACES names a folder without the trace {name}"
    return read_trace(files[name])


def close_to(expected: tuple[float, float], found: Outcome) -> bool:
    return (found.hit_percent, found.work_percent) == pytest.approx(expected, abs=ROUNDING)


@pytest.mark.parametrize("name", list(LRU))
def test_one_tier(name: str) -> None:
    trace = real(name)
    assert close_to(INFINITE[name], replay(trace, LruPolicy(), trace.num_blocks))
    for index, percent in enumerate(CAPACITIES_PERCENT):
        blocks = trace.capacity_blocks(percent)
        assert close_to(LRU[name][index], replay(trace, LruPolicy(), blocks)), percent
        assert close_to(HEADS_FIRST[name][index], replay_heads_first(trace, blocks)), percent
        assert close_to(OPT[name][index], replay_opt(trace, blocks)), percent


@pytest.mark.parametrize("name", list(TWO_TIERS))
def test_two_tiers(name: str) -> None:
    trace = real(name)
    for (arrangement, is_filtered), cells in TWO_TIERS[name].items():
        for (upper, lower), (hits, written) in zip(PAIRS, cells, strict=True):
            tiers = [ReplayTier(LruPolicy(), trace.capacity_blocks(p)) for p in (upper, lower)]
            admission = Doorkeeper() if is_filtered else None
            found = replay_two_tiers(trace, arrangement, tiers[0], tiers[1], admission)
            assert found.hit_percent == pytest.approx(hits, abs=ROUNDING), (arrangement, upper)
            assert found.written_per_block == pytest.approx(written, abs=0.000501), arrangement
