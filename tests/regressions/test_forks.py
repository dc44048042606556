# SPDX-License-Identifier: Apache-2.0
"""Processes that are forked from an engine's: what they hold, and what they may not do."""

from __future__ import annotations

import fcntl
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from stratakv.connector.vllm.region import LOCK, MARK, PREFIX, Hold
from stratakv.engine.client.base import EngineDead
from stratakv.engine.llm import LLM
from stratakv.engine.offline.event_loop_thread import EventLoopThread
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.ssd.folder.directory import StoreDirectory

pytestmark = pytest.mark.regression
HUNG_SECONDS = 20


def in_child(call: Callable[[], object]) -> int:
    """The status of a child that is forked, calls this and ends."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(HUNG_SECONDS)
            call()
            status = 0
        except BaseException:  # it must not come back to pytest
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def test_w04_a_child_holds_no_lock_after_close(tmp_path: Path) -> None:
    """It lives on, as a worker of a data loader does."""
    directory = StoreDirectory(tmp_path / "ssd")
    ends, end = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(HUNG_SECONDS)
        os.close(end)
        os.read(ends, 1)
        os._exit(0)
    os.close(ends)
    try:
        directory.close()
        StoreDirectory(tmp_path / "ssd").close()
    finally:
        os.close(end)
        os.waitpid(child, 0)


def test_w04_a_child_has_no_copy_of_the_lock(tmp_path: Path) -> None:
    """So that the lock of an engine that is killed goes with it."""
    directory = StoreDirectory(tmp_path / "ssd")
    descriptor = directory._lock.descriptor

    def look() -> None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        directory.close()  # its parent's

    assert in_child(look) == 0
    with pytest.raises(TierConfigError, match="in use by process"):
        StoreDirectory(tmp_path / "ssd")
    directory.close()


def test_w04_a_process_that_is_being_started_keeps_no_lock(tmp_path: Path) -> None:
    """Between fork and exec it has copies of all descriptors."""
    directory = StoreDirectory(tmp_path / "ssd")
    copy = os.dup(directory._lock.descriptor)
    directory.close()
    StoreDirectory(tmp_path / "ssd").close()
    os.close(copy)


def test_w04_a_child_leaves_vllms_region_alone(tmp_path: Path) -> None:
    hold = Hold("engine", tmp_path)
    region = tmp_path / f"{PREFIX}engine{MARK}.mmap"
    region.touch()
    assert in_child(hold.abandon) == 0
    assert region.exists()
    with (tmp_path / f"{PREFIX}engine{MARK}{LOCK}").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    hold.abandon()
    assert list(tmp_path.iterdir()) == []
    hold.abandon()


def test_w04_an_llm_in_a_child_says_whose_it_is() -> None:
    llm = LLM.__new__(LLM)
    llm._closed = False
    llm._loop = EventLoopThread("llm")

    def use() -> None:
        for call in (lambda: llm.generate("a prompt"), llm.stats, llm.resume):
            with pytest.raises(EngineDead, match="belongs to the process that this one was forked"):
                call()
        llm.close()  # as atexit does
        llm._loop.close()

    try:
        assert in_child(use) == 0
    finally:
        llm._loop.close()
