# SPDX-License-Identifier: Apache-2.0
"""Mooncake's transfer engine over TCP: blocks between registered memory of two processes.

The far end does nothing but hold memory; all blocks of a call are one batch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any

from ..harness.comparison import WrongWork
from .blocks import Blocks
from .transports import SECONDS, Transport

_HOST = "127.0.0.1"


def why_not() -> str:
    """Why it cannot be measured here; empty if it can."""
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake-transfer-engine-non-cuda is not installed"
    # Apart, for it may want libraries that are not here.
    done = subprocess.run(
        [sys.executable, "-c", "import mooncake.engine"],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    return "" if not done.returncode else f"it cannot be imported: {done.stderr[-200:].strip()}"


class MooncakeTransport(Transport):
    """The client's end. `target` and `addresses` are the far end's."""

    def __init__(self, blocks: Blocks, *, target: str, addresses: list[int]) -> None:
        self._engine = _engine(blocks)
        self._target = target
        self._near = blocks.addresses
        self._far = addresses
        self._size = blocks.layout.page_bytes

    def store(self, order: Sequence[int]) -> None:
        self._move(self._engine.batch_transfer_sync_write, order)

    def load(self, order: Sequence[int]) -> None:
        self._move(self._engine.batch_transfer_sync_read, order)

    def _move(self, move: Any, order: Sequence[int]) -> None:
        near = [self._near[index] for index in order]
        far = [self._far[index] for index in order]
        if move(self._target, near, far, [self._size] * len(order)):
            raise WrongWork("mooncake did not move the blocks")


def serve(pipe: Pipe, block_bytes: int, count: int) -> None:
    """The far end's process, until the parent has had enough."""
    blocks = Blocks(block_bytes, count)
    engine = _engine(blocks)
    pipe.send((f"{_HOST}:{engine.get_rpc_port()}", blocks.addresses))
    with contextlib.suppress(EOFError):
        pipe.recv()


def _engine(blocks: Blocks) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", ""):
        raise WrongWork("mooncake's transfer engine did not start")
    if engine.register_memory(blocks.base, blocks.size):
        raise WrongWork("mooncake did not take the memory")
    return engine
