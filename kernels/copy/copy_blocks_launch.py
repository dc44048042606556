# SPDX-License-Identifier: Apache-2.0
"""How block moves are launched, and the configurations of them that are compiled ahead of time."""

from __future__ import annotations

from ..configuration import Configuration

# 16 KB in 8-byte words. A thread then has four wide loads in flight, so that a few programs fill a
# PCIe link. Narrower words move less at a time, because 64 single bytes take 190 registers.
CHUNK_WORDS = 2048
NUM_WARPS = 8
# Of a move that has the device to itself: several for each multiprocessor of the largest devices.
MAX_PROGRAMS = 1024


def shipped_configurations() -> list[Configuration]:
    """All three moves in the widest word, and one in bytes, for blocks of odd sizes."""
    both, to_rows, from_rows = (True, True), (True, False), (False, True)
    return [
        _configuration("copy_blocks", "i64", both),
        _configuration("gather_blocks", "i64", to_rows),
        _configuration("scatter_blocks", "i64", from_rows),
        _configuration("copy_blocks", "u8", both),
    ]


def _configuration(move: str, word: str, has_ids: tuple[bool, bool]) -> Configuration:
    from .copy_blocks_triton import move_blocks_kernel

    signature = {"source": f"*{word}", "target": f"*{word}"}
    fixed: dict[str, object] = {"CHUNK": CHUNK_WORDS}
    for name, given in zip(("source_ids", "target_ids"), has_ids, strict=True):
        if given:
            signature[name] = "*i64"
        else:
            fixed[name] = None
    sizes = [name for name in move_blocks_kernel.arg_names if name not in {**signature, **fixed}]
    aligned = {"words", "source_stride", "target_stride"} if word != "u8" else set()
    return Configuration(
        name=f"{move}.{word}",
        function=move_blocks_kernel,
        signature=signature | dict.fromkeys(sizes, "i32"),
        constexprs=fixed,
        num_warps=NUM_WARPS,
        multiples_of_16=frozenset(aligned),
    )
