# SPDX-License-Identifier: Apache-2.0
"""KV writes in plain torch: the reference for the Triton kernel, used where Triton cannot run.

The plain and the Triton kernel quantise by the same operations in the same order, so their results
are equal in every bit. The plain kernel waits for the device, because the host reads the slots to
find the rows to write."""

from __future__ import annotations

import torch

from ..kernel_choice import KernelRefused

E4M3_MAX = 448.0
# The smallest normal float32, because its reciprocal is finite and no device flushes it to zero.
SMALLEST_SCALE = 2.0**-126


def write_kv_plain(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    *,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Run `write_kv.write_kv`, checked. Raises KernelRefused for slots outside the pool."""
    num_blocks, _, block_size, _, _ = kv.shape
    lowest, highest = (int(end) for end in slots.aminmax())
    if lowest < -1 or highest >= num_blocks * block_size:
        raise KernelRefused(
            f"expected slots from 0 to {num_blocks * block_size - 1} or -1, "
            f"got {lowest} to {highest}"
        )
    kept = (slots >= 0).nonzero().flatten()
    blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
    for side, source in enumerate((k, v)):
        values = source[kept]
        if kv_scales is None:
            kv[blocks, side, offsets] = values
            continue
        values = values.float()
        if kv_scales.ndim == 2:
            scales = kv_scales[side]
        else:
            scales = computed_scales(values)
            kv_scales[blocks, side, offsets] = scales
        # The pool is indexed as bytes, because torch does not index fp8 on every device.
        kv.view(torch.uint8)[blocks, side, offsets] = quantised(values, scales).view(torch.uint8)


def computed_scales(values: torch.Tensor) -> torch.Tensor:
    """Return each row's scale: its largest finite magnitude over e4m3's largest number."""
    magnitudes = values.abs()
    # Infinities are ignored: an infinite scale would turn the row's other values into zeros.
    finite = torch.where(magnitudes < float("inf"), magnitudes, 0.0)
    # The divisor is a tensor: by a number, torch on CUDA multiplies by its reciprocal, rounding
    # twice.
    largest = finite.amax(-1)
    return (largest / largest.new_full((), E4M3_MAX)).clamp(min=SMALLEST_SCALE)


def quantised(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32 rows as e4m3, divided by their scales. Large numbers saturate."""
    scaled = values * (1.0 / scales).unsqueeze(-1)
    # The clamp is needed because some versions of torch convert numbers beyond the range to NaN.
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
