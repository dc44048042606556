# SPDX-License-Identifier: Apache-2.0
"""What checksums and codecs cost.

Checksums: the same reads and writes of the real store, with and without hashing. No option of the
product leaves a checksum out, so two functions are exchanged here for as long as a round takes.
Codecs: bytes left and rates on one thread, for blocks of normal numbers; real keys and values may
differ. No gate: a codec is an operator's choice for a slow disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from ...connector.fp8_codec import DTYPES, Fp8Codec
from ...tiers import record
from ...tiers.block import BlockLayout
from ...tiers.codecs.base import Codec
from ...tiers.codecs.choice import CODECS
from ...tiers.contract import make_buffers
from ...tiers.ssd import reader, record_writer
from ...tiers.tag import NO_TAG, Proof
from ..harness.comparison import Comparison, WrongWork
from ..harness.report import Report, median, print_table
from .store_case import StoreCase

NAMES = ("checksum_cost_read_2MiB", "checksum_cost_write_2MiB")


def comparisons(case: StoreCase) -> list[Comparison]:
    """Reads, then writes. Rates with hashing against rates without."""
    return [
        Comparison(name, "bytes/s", "no hashing", work, _plainly(work))
        for name, work in zip(NAMES, (case.read, case.write), strict=True)
    ]


def cost(ratio: float) -> float:
    """The part of the time that hashing adds, of a ratio of rates; below zero by chance only."""
    return 1 / ratio - 1


def _plainly(work: Callable[[], float]) -> Callable[[], float]:
    def plain() -> float:
        with (
            patch.multiple(record, payload_digest=lambda _payload: NO_TAG),
            patch.multiple(record_writer, payload_digest=lambda _payload: NO_TAG),
            patch.multiple(reader, verify_record=lambda *_record: Proof(NO_TAG, NO_TAG)),
        ):
            return work()

    return plain


_ROUNDS = 9
_SEED = 5


def measure_codecs(rounds: int = _ROUNDS) -> dict[str, dict[str, Any]]:
    """By codec and dtype: `ratio` of bytes, rates in bytes of the block a second."""
    found = {}
    for dtype in DTYPES:
        layout = BlockLayout(32, 16, 8, 2**8 // DTYPES[dtype].itemsize, dtype)
        for make in (*CODECS.values(), Fp8Codec):
            codec = make(layout)
            found[f"{codec.name}_{dtype}"] = _codec_figures(codec, rounds)
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


def _codec_figures(codec: Codec, rounds: int) -> dict[str, Any]:
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
        "encode": [
            _codec_rate(lambda: codec.encode(payload, out), len(payload)) for _ in range(rounds)
        ],
        "decode": [
            _codec_rate(lambda: codec.decode(encoded, back), len(payload)) for _ in range(rounds)
        ],
    }


def _codec_rate(work: Callable[[], object], num_bytes: int) -> float:
    began = time.perf_counter()
    work()
    return num_bytes / (time.perf_counter() - began)
