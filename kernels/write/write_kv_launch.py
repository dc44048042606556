# SPDX-License-Identifier: Apache-2.0
"""How the KV write is launched, and the configurations of it that are compiled ahead of time.

One tile for all devices and dtypes: a program moves TILE elements, 16 a thread, which is two wide
loads for 16-bit values, and is small enough for many programs to hide each other's latency.
"""

from __future__ import annotations

from ..configuration import Configuration
from .write_kv_plain import E4M3_MAX, SMALLEST_SCALE

TILE = 2048  # elements
NUM_WARPS = 4


def width(head_dim: int) -> int:
    """The power of two that a row takes in registers; the lanes beyond `head_dim` are masked."""
    return max(16, 1 << (head_dim - 1).bit_length())


def rows_per_program(head_dim: int) -> int:
    return max(1, TILE // width(head_dim))


def constants(head_dim: int, block_size: int, num_heads: int, is_given: bool) -> dict[str, object]:
    """The kernel's constexpr arguments. `is_given`: scales are read, not computed."""
    return {
        "HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "SCALES_GIVEN": is_given,
        "LARGEST": E4M3_MAX,
        "SMALLEST": SMALLEST_SCALE,
        "ROWS": rows_per_program(head_dim),
        "WIDTH": width(head_dim),
    }


def shipped_configurations() -> list[Configuration]:
    """Slices of one qkv tensor into a pool of blocks that hold all layers."""
    found = []
    for head_dim, dtype in ((64, "bf16"), (128, "bf16"), (128, "fp16"), (128, "fp32")):
        found.append(_configuration(head_dim, dtype, dtype, "none"))
    found += [_configuration(128, "bf16", "fp8e4nv", scales) for scales in ("given", "computed")]
    return found


def _configuration(head_dim: int, dtype: str, pool_dtype: str, scales: str) -> Configuration:
    from .write_kv_triton import write_kv_kernel

    fixed: dict[str, object] = {**constants(head_dim, 16, 8, scales == "given")}
    fixed |= {"k_dim_stride": 1, "v_dim_stride": 1}
    signature = {"k": f"*{dtype}", "v": f"*{dtype}", "kv": f"*{pool_dtype}", "slots": "*i64"}
    if scales == "none":
        fixed["scales"] = None
    else:
        signature["scales"] = "*fp32"
        fixed["scale_head_stride"] = 1
    # What is left are sizes and strides.
    sizes = [name for name in write_kv_kernel.arg_names if name not in {**signature, **fixed}]
    return Configuration(
        name=f"write_kv.{dtype}.{pool_dtype}.{scales}.d{head_dim}",
        function=write_kv_kernel,
        signature=signature | dict.fromkeys(sizes, "i32"),
        constexprs=fixed,
        num_warps=NUM_WARPS,
        multiples_of_16=frozenset(
            name for name in sizes if name.endswith("_stride") and not name.startswith("scale_")
        ),
        min_capability=(8, 9) if pool_dtype == "fp8e4nv" else (8, 0),
    )
