# SPDX-License-Identifier: Apache-2.0
"""Prompt embeddings from the bytes of a safetensors file, as clients send them.

The bytes are untrusted. The header is checked before the data, which is only read as numbers."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

EmbedArray = npt.NDArray[np.floating[Any]]

# The name of a type in a safetensors file -> the numpy type of its bytes.
_TYPES = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8"}
_LENGTH_BYTES = 8
# A header with one tensor has some hundred bytes; the limit leaves room for metadata.
MAX_HEADER_BYTES = 64 * 1024
_METADATA = "__metadata__"


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    """The header's entry for one tensor."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class EmbedsError(ValueError):
    """The error, with its reason, for bytes that are not prompt embeddings of this model."""


def read_embeds(
    data: bytes, hidden_size: int, max_tokens: int, largest: float = math.inf
) -> EmbedArray:
    """Read the only tensor of a safetensors file: float16, bfloat16, float32 or float64
    `[num_tokens, hidden_size]` of 1 to `max_tokens` tokens. Float64 values stay float64; other
    types become float32, without loss. `largest` is the largest number of the model's type.

    Raises EmbedsError, which names the fault, for any other content, for numbers that are not
    finite and for numbers that the model's type cannot hold."""
    tensor, content = _only_tensor(data)
    name, shape = tensor.dtype, tensor.shape
    if name not in _TYPES:
        raise EmbedsError(
            f"prompt embeddings have the dtype F16, BF16, F32 or F64, not {name[:20]!r}"
        )
    if len(shape) != 2 or shape[1] != hidden_size:
        raise EmbedsError(
            f"prompt embeddings of this model have the shape [tokens, {hidden_size}], not "
            f"{_short(shape)}"
        )
    if not 1 <= shape[0] <= max_tokens:
        raise EmbedsError(
            f"prompt embeddings are of 1 to {max_tokens} tokens, and these of {shape[0]}"
        )
    dtype = np.dtype(_TYPES[name])
    size = math.prod(shape) * dtype.itemsize
    if tensor.data_offsets != (0, size) or len(content) != size:
        raise EmbedsError(
            f"prompt embeddings of the shape {shape} in {name} take {size} bytes, and the file has "
            f"{len(content)} (data_offsets {_short(list(tensor.data_offsets))})"
        )
    values: EmbedArray = _floats(np.frombuffer(content, dtype).reshape(shape), name)
    finite = np.isfinite(values)
    if not finite.all():
        token, element = np.argwhere(~finite)[0].tolist()
        raise EmbedsError(
            f"prompt embeddings are finite numbers, and element {element} of token {token} is "
            f"{values[token, element]}"
        )
    within = np.abs(values) <= min(largest, float(np.finfo(values.dtype).max))
    if not within.all():
        token, element = np.argwhere(~within)[0].tolist()
        raise EmbedsError(
            f"this model computes with numbers up to {largest:.6g}, and element {element} of token "
            f"{token} of the prompt embeddings is {values[token, element]:.6g}"
        )
    return values


def write_embeds(values: npt.NDArray[Any]) -> bytes:
    """Return the bytes for `read_embeds`, from float16, float32 or float64 `[num_tokens, hidden]`.
    Raises EmbedsError for another type."""
    names = {np.dtype(kind): name for name, kind in _TYPES.items() if name != "BF16"}
    array = np.ascontiguousarray(values)
    name = names.get(array.dtype)
    if name is None:
        raise EmbedsError(f"prompt embeddings are float16, float32 or float64, not {array.dtype}")
    tensor = {"dtype": name, "shape": list(array.shape), "data_offsets": [0, array.nbytes]}
    header = msgspec.json.encode({"prompt_embeds": tensor})
    header += b" " * (-len(header) % _LENGTH_BYTES)
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header + array.tobytes()


def _only_tensor(data: bytes) -> tuple[_Tensor, memoryview]:
    """Return the header's only entry and the bytes after the header. Raises EmbedsError."""
    size = int.from_bytes(data[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + size
    if len(data) < _LENGTH_BYTES or start > len(data):
        raise EmbedsError(
            f"prompt embeddings are a safetensors file; these {len(data)} bytes end inside its "
            "header"
        )
    if size > MAX_HEADER_BYTES:
        raise EmbedsError(
            f"the safetensors header of prompt embeddings has at most {MAX_HEADER_BYTES} bytes, "
            f"not {size}"
        )
    try:
        header = msgspec.json.decode(data[_LENGTH_BYTES:start], type=dict[str, msgspec.Raw])
        header.pop(_METADATA, None)
        tensors = [msgspec.json.decode(raw, type=_Tensor) for raw in header.values()]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EmbedsError(
            f"prompt embeddings are a safetensors file, and its header cannot be read: {error}"
        ) from error
    if len(tensors) != 1:
        raise EmbedsError(f"prompt embeddings are one tensor, and the file has {len(tensors)}")
    return tensors[0], memoryview(data)[start:]


def _floats(values: npt.NDArray[Any], name: str) -> EmbedArray:
    if name == "BF16":  # bfloat16 is the upper half of a float32
        wide = values.astype("<u4") << np.uint32(16)
        return wide.view("<f4").astype(np.float32, copy=False)
    return values.astype(np.float64 if name == "F64" else np.float32)


def _short(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:4])
    return f"[{shown}, ...]" if len(numbers) > 4 else f"[{shown}]"
