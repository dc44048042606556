# SPDX-License-Identifier: Apache-2.0
"""What codecs save and cost: bytes left and rates on one thread, for blocks of normal numbers.

Real keys and values may differ. No gate: a codec is an operator's choice for a slow disk. Knows
nothing of disks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ...connector.fp8_codec import DTYPES, Fp8Codec
from ...tiers.block import BlockLayout
from ...tiers.codecs.base import Codec
from ...tiers.codecs.choice import CODECS
from ...tiers.contract import make_buffers
from ..harness.comparison import WrongWork
from ..harness.report import Report, median, print_table

_ROUNDS = 9
_SEED = 5


def measure_codecs(rounds: int = _ROUNDS) -> dict[str, dict[str, Any]]:
    """By codec and dtype: `ratio` of bytes, rates in bytes of the block a second."""
    found = {}
    for dtype in DTYPES:
        layout = BlockLayout(32, 16, 8, 2**8 // DTYPES[dtype].itemsize, dtype)
        for make in (*CODECS.values(), Fp8Codec):
            codec = make(layout)
            found[f"{codec.name}_{dtype}"] = _figures(codec, rounds)
    return found


def print_codecs(report: Report) -> None:
    """A row for each codec and dtype."""
    rows = [
        [name.replace("_", " ", 1), f"{each['ratio']:.2f}"]
        + [f"{median(each[rates]) / 1e9:.2f}" for rates in ("encode", "decode")]
        for name, each in report.figures["codecs"].items()
    ]
    columns = ["codec", "bytes left", "encode GB/s", "decode GB/s"]
    print_table("Codecs, one thread, normal numbers, blocks of 2 MiB", columns, rows)


def _figures(codec: Codec, rounds: int) -> dict[str, Any]:
    payload, out, back = make_buffers(3, codec.layout)
    dtype = DTYPES[codec.layout.kv_dtype]
    generator = torch.Generator().manual_seed(_SEED)
    numbers = torch.randn(codec.layout.page_bytes // dtype.itemsize, generator=generator)
    torch.frombuffer(payload, dtype=dtype).copy_(numbers)
    used = codec.encode(payload, out)
    if used is None:
        raise WrongWork(f"the codec {codec.name} has no encoding for normal numbers")
    encoded = out[:used]
    codec.decode(encoded, back)
    if codec.is_lossless and back != payload:
        raise WrongWork(f"the codec {codec.name} gave other bytes back")
    return {
        "ratio": used / len(payload),
        "encode": [_rate(lambda: codec.encode(payload, out), len(payload)) for _ in range(rounds)],
        "decode": [_rate(lambda: codec.decode(encoded, back), len(payload)) for _ in range(rounds)],
    }


def _rate(work: Callable[[], object], num_bytes: int) -> float:
    began = time.perf_counter()
    work()
    return num_bytes / (time.perf_counter() - began)
