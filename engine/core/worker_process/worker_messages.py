# SPDX-License-Identifier: Apache-2.0
"""Messages between the executor and its worker process: msgpack over one pair of ZMQ sockets.

The worker answers each message except `Sample` and `Stop`, in order: a `Begin` with `Done` or
`Failed` after its `Sample`, a `Call` with `Returned` or `Failed`. An array is sent as dtype, shape
and bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ....connector.build import WorkerDescription
from ....connector.messages import ConnectorMetadata, ConnectorWorkerOutput
from ...config.engine_config import EngineConfig
from ...sampling.token_mask import TokenMask
from ...scheduler.output import ModelRunnerOutput, SchedulerOutput
from ..start import decode_path, encode_path


class WorkerStart(msgspec.Struct):
    """All settings that a worker process needs to start."""

    config: EngineConfig
    endpoint: str  # the address to which the worker connects
    num_blocks: int | None  # blocks of the pool; None: as many as fit on the device
    max_model_len: int
    log_level: str
    copies: WorkerDescription | None = None  # for the worker side of a connector
    wake_fd: int = -1  # the worker writes the number of ended copies here, u32 little-endian
    reads_fd: int = -1  # the socket of `adapter_reads`
    # Linux kills the worker when the thread that began it ends, even if the worker hangs.
    dies_with_launcher: bool = False


class Begin(msgspec.Struct, tag="begin", array_like=True):
    """Start a step."""

    step: SchedulerOutput


class Sample(msgspec.Struct, tag="sample", array_like=True):
    """Sample the tokens of the oldest step that is not sampled yet."""

    mask: TokenMask | None = None


class Call(msgspec.Struct, tag="call", array_like=True):
    """Execute a call between steps; see `Executor.call_worker`."""

    name: str
    meta: ConnectorMetadata | None = None
    seconds: float | None = None
    number: int = 0  # of the adapter of `add_adapter`; see `adapter_reads`
    fingerprint: bytes = b""  # of the adapter of `drop_adapter`


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """End the process after handling all earlier messages."""


class Up(msgspec.Struct, tag="up", array_like=True):
    """The first message of a worker: the model is loaded."""

    num_blocks: int
    max_model_len: int


class Done(msgspec.Struct, tag="done", array_like=True):
    """The result of a step."""

    step_id: int
    result: ModelRunnerOutput


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The error of a step, of a call (`step_id` is None), or of the start (before `Up`)."""

    error: str
    step_id: int | None = None
    is_config_error: bool = False
    is_device_lost: bool = False


class Returned(msgspec.Struct, tag="returned", array_like=True):
    """The answer to a `Call`."""

    output: ConnectorWorkerOutput | None = None


ToWorker = Begin | Sample | Call | Stop
FromWorker = Up | Done | Failed | Returned


def encode(message: ToWorker | FromWorker) -> bytes:
    return _encoder.encode(message)


def decode_to_worker(frame: bytes) -> ToWorker:
    """Decode a message to the worker. Raises msgspec.MsgspecError for other bytes."""
    message: ToWorker = _to_worker.decode(frame)
    return message


def decode_from_worker(frame: bytes) -> FromWorker:
    """Decode a message from the worker. Raises msgspec.MsgspecError for other bytes."""
    message: FromWorker = _from_worker.decode(frame)
    return message


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), np.ascontiguousarray(value).data.cast("B")]
    return encode_path(value)


def _decode_array(kind: type, value: Any) -> Any:
    if kind is np.ndarray or getattr(kind, "__origin__", None) is np.ndarray:
        dtype, shape, data = value
        if np.dtype(dtype).hasobject:
            raise ValueError("an array of objects does not travel")
        return np.frombuffer(data, dtype).reshape(shape)
    return decode_path(kind, value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_to_worker = msgspec.msgpack.Decoder(ToWorker, dec_hook=_decode_array)
_from_worker = msgspec.msgpack.Decoder(FromWorker, dec_hook=_decode_array)
