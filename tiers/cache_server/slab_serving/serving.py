# SPDX-License-Identifier: Apache-2.0
"""SlabServing: runs the process (`slab_process.py`) that serves an engine's slab to other engines.

A thread watches the process. If the process ends, or writes nothing for `SILENT_SECONDS`, the
thread starts a new process after a pause, which grows with each failure. Until the new process is
ready, other engines get misses without waiting."""

from __future__ import annotations

import logging
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Any

import msgspec

from ...errors import TierConfigError
from ...processes.python_command import python_command
from ...slab.cpu_slab import CpuSlab
from ...tier_settings import ListenAddress, ServeSettings
from ...wire.listen import LARGEST_PORT, host_port, is_loopback
from .served_files import ServedFiles, in_flags_of_serve

log = logging.getLogger(__name__)

START_SECONDS = 60.0  # time for a process to start on a busy host
_PAUSES = (0.5, 1.0, 2.0, 5.0, 15.0, 60.0)  # before each new start; the last pause repeats
SILENT_SECONDS = 30.0  # the process writes a line every few seconds, also when idle
_MAX_LINE_BYTES = 64 * 1024
_STEADY_SECONDS = 120.0  # after a run of this length, the first pause is next
_END_SECONDS = 1.0  # time between the end of a process's output and its exit
_MODULE = "stratakv.tiers.cache_server.slab_serving.slab_process"


class SlabServing:
    """Serves `slab` from construction to `close`. The slab must have an index, and other engines
    must use the same `namespace`. Raises TierConfigError if the slab cannot be served."""

    def __init__(
        self,
        slab: CpuSlab,
        address: ListenAddress,
        settings: ServeSettings,
        *,
        namespace: bytes,
    ) -> None:
        if slab.index is None:
            raise TierConfigError("a slab is served only where it was made for it")
        self._slab = slab
        self._start = _start_of(slab, address, settings, namespace)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._ready = threading.Event()
        self._error = ""
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.num_starts = 0
        self._sent_before = (0, 0)  # blocks and bytes that earlier processes sent
        self._sent = (0, 0)
        self._held = 0
        self._thread = threading.Thread(
            target=self._look_after, name="stratakv-peer-serving", daemon=True
        )
        self._thread.start()
        if not self._ready.wait(START_SECONDS):
            self._error = f"it was not ready within {START_SECONDS:g} s"
        if self._error:
            self.close(0.0)
            raise TierConfigError(f"--kv-serve: {in_flags_of_serve(self._error)}")
        log.info("other engines can read the cpu tier at %s", host_port(address.host, self.port))

    @property
    def is_up(self) -> bool:
        """Whether the serving process is ready and has not ended."""
        return self._ready.is_set() and self._process is not None

    def stats(self) -> dict[str, float]:
        """Return counters since the start, and gauges. The values are about a second old."""
        blocks, size = (a + b for a, b in zip(self._sent_before, self._sent, strict=True))
        return {
            "serving_up": float(self.is_up),
            "serving_starts": self.num_starts,
            "served_blocks": blocks,
            "served_bytes": size,
            "served_held_blocks": self._held,
        }

    def close(self, timeout_seconds: float) -> None:
        """End the process within about `timeout_seconds`. Idempotent."""
        with self._lock:
            self._closing.set()
            process = self._process
        if process is not None and process.stdin is not None:
            with suppress(BrokenPipeError):  # the process ended before it read its input
                process.stdin.close()
            try:
                process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                process.kill()
        self._thread.join(timeout_seconds + 5.0)

    def _look_after(self) -> None:
        ends = 0
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                self._run_once()
            except Exception:  # the thread must go on: no other one restarts the process
                log.exception("the process that serves this engine's blocks cannot be looked after")
            if not self._ready.is_set():  # the constructor reports the first failure
                self._error = self._error or "the process that serves blocks could not be started"
                self._ready.set()
                return
            if time.monotonic() - began > _STEADY_SECONDS:
                ends = 0
            pause = _PAUSES[min(ends, len(_PAUSES) - 1)]
            ends += 1
            if not self._closing.is_set():
                log.warning(
                    "the process that serves this engine's blocks is gone%s; it is started again "
                    "in %g s",
                    f" ({self._error})" if self._error else "",
                    pause,
                )
                self._error = ""
            self._closing.wait(pause)

    def _run_once(self) -> None:
        """Start a process, and read the lines of its output until the process ends."""
        index = self._slab.index
        assert index is not None
        slab_fd = os.open(f"/proc/self/fd/{self._slab.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            line = dict(self._start, slab_fd=slab_fd, index_fd=index.fd)
            with self._lock:
                if self._closing.is_set():
                    return
                self._process = process = subprocess.Popen(
                    python_command("-m", _MODULE),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(slab_fd, index.fd),
                    close_fds=True,
                )
                self.num_starts += 1
        finally:
            os.close(slab_fd)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(line) + b"\n")
            process.stdin.flush()
            for line_of_it in _lines(process.stdout, START_SECONDS, SILENT_SECONDS):
                self._handle_line(line_of_it)
        except TimeoutError as error:
            self._error = f"it hung: {error}"
        except BrokenPipeError:
            pass  # the process ended before it read its input
        except ValueError:  # `close` has closed the process's standard input
            if not self._closing.is_set():
                raise
        finally:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(_END_SECONDS)
                self._error = self._error or f"it ended with exit status {status}"
            process.kill()
            process.wait()
            process.stdout.close()
            index.release_all()
            with self._lock:
                self._process = None
            before, sent = self._sent_before, self._sent
            self._sent_before = (before[0] + sent[0], before[1] + sent[1])
            self._sent, self._held = (0, 0), 0

    def _handle_line(self, line: bytes) -> None:
        try:
            said: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError:  # a line that the Python interpreter wrote
            log.warning("%s", line.decode(errors="replace").rstrip())
            return
        if "ready" in said:
            self.port = int(said["ready"])
            # A restarted process uses the port of the first process.
            self._start["port"] = self.port
            self._error = ""
            if self._slab.index is not None:
                self._slab.index.is_read = True
            self._ready.set()
        elif "error" in said:
            self._error = str(said["error"])
        elif "sent" in said:
            blocks, size = said["sent"]
            self._sent, self._held = (int(blocks), int(size)), int(said["held"])
        elif "log" in said:
            level, text = said["log"]
            log.log(int(level), "%s", text)


def _lines(stream: IO[bytes], first_seconds: float, silent_seconds: float) -> Iterator[bytes]:
    """Yield a pipe's lines, in pieces of _MAX_LINE_BYTES at most. Raises TimeoutError after
    `first_seconds` without a first byte, or `silent_seconds` without a later byte."""
    held, wait = b"", first_seconds
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while selector.select(wait):
            wait = silent_seconds
            read = os.read(stream.fileno(), _MAX_LINE_BYTES)
            if not read:
                if held:
                    yield held
                return
            *lines, held = (held + read).split(b"\n")
            yield from lines
            if len(held) >= _MAX_LINE_BYTES:
                yield held
                held = b""
    raise TimeoutError(f"nothing was heard of it for {wait:g} s")


def _start_of(
    slab: CpuSlab,
    address: ListenAddress,
    settings: ServeSettings,
    namespace: bytes,
) -> dict[str, Any]:
    """Return the fields of `slab_process.Start` except the descriptors. Raises TierConfigError."""
    from ..access.tenants import new_token

    paths = (settings.token_file, settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    token_file, cert, key, client_ca = (None if path is None else str(path) for path in paths)
    files = ServedFiles(token_file=token_file, tls_cert=cert, tls_key=key, tls_client_ca=client_ca)
    files.check_flags()
    is_open = token_file is None and client_ca is None and not settings.insecure
    own_token = new_token() if is_open and is_loopback(address.host) else None
    layout = slab.layout
    return {
        "num_slots": slab.num_slots,
        "layout": (
            layout.num_layers,
            layout.block_size,
            layout.num_kv_heads,
            layout.head_dim,
            layout.kv_dtype,
        ),
        "namespace": namespace,
        "host": address.host,
        "port": address.port,
        "data_port": address.port + 1 if 0 < address.port < LARGEST_PORT else 0,
        "files": msgspec.structs.asdict(files),
        "own_token": own_token,
        "insecure": settings.insecure,
        "log_level": log.getEffectiveLevel(),
    }
