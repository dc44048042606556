# SPDX-License-Identifier: Apache-2.0
"""The phase `remote` of `stratakv bench offload`: what one engine computed, another one is asked.

A cache server and an engine that computes every document, which then goes; and a second engine that
has nothing of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..harness.served import ServedModel
from ..service.servers import cache_server
from .report import Plan

ROOM_TO_SPARE = 1.5
Work = Callable[[ServedModel], None]


def measure_remote(plan: Plan, log: Path, write: Work, read: Work) -> None:
    """Start all three. `write` asks the first engine for every document, `read` the second."""
    with cache_server(int(ROOM_TO_SPARE * plan.cpu_bytes)) as server:
        words = plan.remote_arguments(f"grpc://127.0.0.1:{server.port}")
        with ServedModel(words, log) as first:
            write(first)
        # It has gone in an orderly way, so the server has everything.
        with ServedModel(words, log) as second:
            read(second)
