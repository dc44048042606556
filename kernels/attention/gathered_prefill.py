# SPDX-License-Identifier: Apache-2.0
"""Prefill of long chunks by a library: K and V of a request are gathered from the paged pool into
buffers, and the library computes attention over the buffers.

    sdpa   scaled_dot_product_attention of torch
    fa3    FlashAttention-3, from the package fa3-fwd

    pool of a layer   | b7 | b2 | b9 |    blocks of one request, anywhere
    buffers           | K K K |, | V V V |    contiguous, the same for every request and layer

The library computes one request after the other. The lengths of the requests are already on the
host, so the host does not wait for the GPU."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..kernel_choice import MIN_CAPABILITY, probe_hardware
from ..pool_checks import FP8

SDPA, FA3 = "sdpa", "fa3"
LIBRARIES = (FA3, SDPA)
# The gather copies K and V of the whole context once. Attention does as many operations per byte as
# the chunk has rows, so for a chunk of few rows the gather takes much of the time.
MIN_ROWS = 1024
MAX_BYTES = 256 * 2**20  # of the buffers of K and V: 64k tokens of 8 16-bit heads of 128
MAX_HEAD_DIM = 256
HEAD_DIM_UNIT = 8
FA3_CAPABILITY = (9, 0)
_FA3_MODULE = "fa3_fwd_interface"
_DTYPES = {FA3: (torch.bfloat16,), SDPA: (torch.bfloat16, torch.float16)}


class Library(Protocol):
    """A library that computes causal attention over contiguous K and V."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return `[rows, heads, head_dim]`, the same shape as `q`. The rows of `q` are the last
        positions of `k` and `v` `[tokens, kv heads, head_dim]`."""


class Sdpa:
    """The scaled_dot_product_attention of torch, with its flash kernel."""

    def __init__(self) -> None:
        # The import loads torch's compiler, which takes a second.
        from torch.nn.attention.bias import causal_lower_right

        self._mask = causal_lower_right

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        mask: Any = self._mask(q.shape[2], k.shape[2])
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)


class FlashAttention3:
    """FlashAttention-3, from the package fa3-fwd. Its mask treats queries as the last positions."""

    def __init__(self) -> None:
        self._attend = importlib.import_module(_FA3_MODULE).flash_attn_func

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out: Tensor = self._attend(q[None], k[None], v[None], softmax_scale=scale, causal=True)
        return out[0]


def open_library(name: str) -> Library:
    """Import the library `name`. Raises ImportError if the library is not installed."""
    return FlashAttention3() if name == FA3 else Sdpa()


class GatheredPrefill:
    """A library with buffers for gathered K and V, for all layers of one pool."""

    def __init__(self, name: str, kv: Tensor, max_tokens: int, *, min_rows: int = MIN_ROWS) -> None:
        """`kv` is one layer of the pool; `max_tokens` is the longest request, in tokens."""
        self.name, self.min_rows = name, min_rows
        self._library = open_library(name)
        block_size, kv_heads, head_dim = kv.shape[2:]
        fits = max(MAX_BYTES // buffer_bytes(block_size, kv_heads, head_dim, kv.dtype), 1)
        shape = min(-(-max_tokens // block_size), fits), *kv.shape[2:]
        self._buffers = [torch.empty(shape, dtype=kv.dtype, device=kv.device) for _ in range(2)]

    @property
    def max_tokens(self) -> int:
        """The longest context, in tokens, that fits the buffers."""
        blocks, block_size = self._buffers[0].shape[:2]
        return blocks * block_size

    def takes(self, rows: int, length: int) -> bool:
        """Whether the library is used for the last `rows` tokens of a context of `length`
        tokens."""
        return rows >= self.min_rows and length <= self.max_tokens

    def run(
        self, q: Tensor, kv: Tensor, table: Tensor, length: int, scale: float, out: Tensor
    ) -> Tensor:
        """Write the attention of `q` `[rows, heads, head_dim]` to `out`, and return `out`. The rows
        are the last positions of a request that has `length` tokens in the blocks `table`
        `[max_blocks]`."""
        blocks = table[: -(-length // kv.shape[2])]
        k, v = (
            torch.index_select(kv[:, plane], 0, blocks, out=buffer[: len(blocks)])
            .flatten(0, 1)
            .narrow(0, 0, length)
            for plane, buffer in enumerate(self._buffers)
        )
        return out.copy_(self._library.attend(q, k, v, scale))


def buffer_bytes(num_tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """The size in bytes of K and V of `num_tokens` tokens in one layer."""
    return 2 * num_tokens * kv_heads * head_dim * dtype.itemsize


def reason_against_library(name: str, q: Tensor, kv: Tensor) -> str | None:
    """Return the reason why the library `name` cannot compute attention of queries like `q` `[any,
    heads, head_dim]` over a layer `kv` of the pool, or None. For FlashAttention-3, the last check
    imports the library."""
    head_dim = q.shape[2]
    capability = probe_hardware().capability
    if capability is None:
        return "it runs on a CUDA device, and there is none"
    if name == FA3 and capability != FA3_CAPABILITY:
        return f"it is built for compute capability {FA3_CAPABILITY}, and this is {capability}"
    if capability < MIN_CAPABILITY:
        return f"it needs compute capability {MIN_CAPABILITY}, and this is {capability}"
    if kv.dtype == FP8:
        return f"it reads no K and V of {FP8}"
    if q.dtype not in _DTYPES[name]:
        return f"it takes {' or '.join(map(str, _DTYPES[name]))}, and these are {q.dtype}"
    if head_dim > MAX_HEAD_DIM or head_dim % HEAD_DIM_UNIT:
        return (
            f"it takes heads of a multiple of {HEAD_DIM_UNIT} elements up to {MAX_HEAD_DIM}, and "
            f"these have {head_dim}"
        )
    return _reason_against_import() if name == FA3 else _reason_against_flash(q, kv)


def _reason_against_flash(q: Tensor, kv: Tensor) -> str | None:
    """Return the reason why torch's flash kernel cannot run, or None. Torch's other attention
    kernels are not used, because these kernels store all scores in memory."""
    if not q.is_cuda:
        return None
    from torch.backends.cuda import SDPAParams, can_use_flash_attention

    q, k = (tensor.new_empty(1, heads, 16, q.shape[2]) for tensor, heads in (
        (q, q.shape[1]), (kv, kv.shape[3]),
    ))  # fmt: skip
    if can_use_flash_attention(SDPAParams(q, k, k, None, 0.0, False, True)):
        return None
    return "torch's flash kernel cannot run, and its others hold all scores in memory"


def _reason_against_import() -> str | None:
    try:
        importlib.import_module(_FA3_MODULE).flash_attn_func  # noqa: B018
    except ModuleNotFoundError as error:
        if error.name == _FA3_MODULE:
            return "fa3-fwd is not installed (pip install '.[fa3]' in a clone)"
        return f"fa3-fwd cannot be imported: {error}"
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"fa3-fwd cannot be imported: {error}"
    return None
