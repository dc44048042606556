# SPDX-License-Identifier: Apache-2.0
"""The Unix socket that hands a tenant store's memory to processes of the same user on the same
host.

It lies in a folder of its own that only the user can enter, and the kernel is asked who calls. A
ticket says whose tenant store it is: nobody gets the memory of another tenant. The folder is locked
while its server lives, so that the next one sees which folders killed ones have left, and removes
them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Mapping

from ...errors import TierConfigError
from ...tag import PROOF_BYTES, unpack_proof
from ...wire.frames import (
    MAX_LEASE_SECONDS,
    NO_PROOF,
    Request,
    State,
    Status,
    Verb,
    Welcome,
    WireError,
    encode_welcome,
)
from ...wire.limits import Limits
from ...wire.sockets import Connection, ConnectionLost
from ..leases import Lease, Leases, ReadLease, WriteLease
from ..served_store import ServedStore
from .session import Draining, Session
from .session_server import SessionServer

# PIN, UNPIN, RESERVE and COMMIT: the client has mapped the tenant store's memory, only slots are
# named. What a client holds ends at its time, and with its connection, so that a client that was
# killed holds nothing. A client that was stopped in the middle of a copy writes on when it runs
# again, so slots that it reserved stay out of use until it says that it is done with them (COMMIT)
# or its connection ends; its connection does not end by being silent until then. Should it write
# later still, the tags of the blocks tell.

MAX_HELD = 64  # leases of one connection at a time


class MemorySession(Session):
    """The session of a client on the same host."""

    def __init__(
        self,
        connection: Connection,
        tenant_store: ServedStore,
        limits: Limits,
        draining: Draining,
    ) -> None:
        super().__init__(connection, tenant_store, limits, draining)
        self._leases = Leases[ReadLease | WriteLease](self._expired)
        self._withheld: dict[int, list[int]] = {}  # slots, by the lease that has ended

    def close(self) -> None:
        for lease in self._leases:
            self._leases.end_lease(lease)
            self._give_back(lease.held)
        for slots in self._withheld.values():
            self._tenant_store.restore_slots(slots)
        self._withheld.clear()

    def _answers(self) -> Mapping[Verb, Callable[[Request, float], None]]:
        return {
            Verb.PIN: self._pin,
            Verb.UNPIN: self._unpin,
            Verb.RESERVE: self._reserve,
            Verb.COMMIT: self._commit,
        }

    def _wait(self) -> bool:
        silent_until = time.monotonic() + self._limits.idle_seconds
        while True:
            if self._withheld:
                silent_until = time.monotonic() + self._limits.idle_seconds
            next_deadline = self._leases.next_deadline()
            wake = silent_until if next_deadline is None else min(silent_until, next_deadline)
            if self._connection.wait_readable(wake, self._draining.fd):
                return True
            self._leases.expire()
            if time.monotonic() >= silent_until or self._draining.has_begun:
                return False

    def _pin(self, request: Request, deadline: float) -> None:
        seconds = _seconds(request)
        keys = self._receive_keys(request, deadline)
        if self._is_full(request, deadline):
            return
        tenant_store = self._tenant_store
        read_lease = tenant_store.begin_load(keys)
        lease = self._leases.grant_lease(read_lease, seconds)
        tenant_store.wait_loaded(read_lease, deadline)
        hits = [slot for slot in read_lease.slots if slot is not None]
        states = bytes(State.MISS if slot is None else State.HIT for slot in read_lease.slots)
        slots = struct.pack(f"<{len(hits)}I", *hits)
        pairs = zip(read_lease.slots, tenant_store.tags(read_lease), strict=True)
        tags = b"".join(tag for slot, tag in pairs if slot is not None)
        self._send_reply(
            request,
            Status.OK,
            deadline,
            blocks=len(keys),
            argument=lease.number,
            rest=states + slots + tags,
        )

    def _unpin(self, request: Request, _deadline: float) -> None:
        lease = self._leases.find_lease(request.argument)
        if lease is not None and isinstance(lease.held, ReadLease):
            self._leases.end_lease(lease)
            self._give_back(lease.held)

    def _reserve(self, request: Request, deadline: float) -> None:
        seconds = _seconds(request)
        keys = self._receive_keys(request, deadline)
        if self._is_full(request, deadline):
            return
        write_lease = self._tenant_store.begin_store(keys)
        number = self._leases.grant_lease(write_lease, seconds).number
        wanted = [slot for slot in write_lease.slots if slot is not None]
        rest = bytes(write_lease.states) + struct.pack(f"<{len(wanted)}I", *wanted)
        self._send_reply(request, Status.OK, deadline, blocks=len(keys), argument=number, rest=rest)

    def _commit(self, request: Request, deadline: float) -> None:
        raw = self._connection.receive(request.blocks * PROOF_BYTES, deadline)
        lease = self._leases.find_lease(request.argument)
        if lease is None or not isinstance(lease.held, WriteLease):
            self._tenant_store.restore_slots(self._withheld.pop(request.argument, ()))
            self._send_reply(request, Status.NO_LEASE, deadline)
            return
        held = lease.held
        if held.states.count(State.WANTED) != request.blocks:
            raise WireError(
                f"COMMIT brings {request.blocks} proofs for {held.states.count(State.WANTED)} slots"
            )
        given = (raw[i : i + PROOF_BYTES] for i in range(0, len(raw), PROOF_BYTES))
        packed = [NO_PROOF if slot is None else next(given) for slot in held.slots]
        proofs = [None if each == NO_PROOF else unpack_proof(each) for each in packed]
        checked = self._tenant_store.check_digests(held, proofs)
        self._leases.end_lease(lease)
        states = self._tenant_store.end_store(held, checked)
        self._send_reply(request, Status.OK, deadline, blocks=len(states), rest=bytes(states))

    def _is_full(self, request: Request, deadline: float) -> bool:
        self._leases.expire()
        if len(self._leases) + len(self._withheld) < MAX_HELD:
            return False
        self._send_reply(request, Status.BUSY, deadline)
        return True

    def _expired(self, lease: Lease[ReadLease | WriteLease]) -> None:
        if isinstance(lease.held, ReadLease):
            self._tenant_store.count_expired_lease()
            self._give_back(lease.held)
        elif slots := self._tenant_store.abandon_store(lease.held):
            self._withheld[lease.number] = slots

    def _give_back(self, held: ReadLease | WriteLease) -> None:
        if isinstance(held, ReadLease):
            self._tenant_store.end_load(held)
        else:
            count = len(held.keys)
            self._tenant_store.end_store(held, [None] * count, range(count))


def _seconds(request: Request) -> float:
    """How long a request wants to hold blocks. Raises WireError for what is out of range."""
    seconds = request.argument / 1000
    if not 0 < seconds <= MAX_LEASE_SECONDS:
        raise WireError(f"a lease runs for up to {MAX_LEASE_SECONDS:g} s, not {seconds:g}")
    return seconds


_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_PREFIX, _SOCKET = "stratakv-memory-", "socket"


class MemoryServer(SessionServer):
    """Listens on a new path."""

    _folder: str | None = None
    _folder_lock: int | None = None

    def start(self) -> str:
        """Listen; the path. Raises TierConfigError where that cannot be."""
        why = []
        for parent in _parents():
            try:
                return self._start_in(parent)
            except OSError as error:
                self._remove_folder()
                why.append(f"{parent}: {error.strerror or error}")
        raise TierConfigError(
            f"no Unix socket can be made for clients on this host ({'; '.join(why)}); set TMPDIR "
            "to a folder with a short name that may be written to, or start without memory for "
            "them: --no-shared-memory"
        )

    def _start_in(self, parent: str) -> str:
        _remove_left_folders(parent)
        self._folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)  # 0700
        self._folder_lock = _lock(self._folder)
        path = os.path.join(self._folder, _SOCKET)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            os.chmod(path, 0o600)
        except OSError:
            listener.close()
            raise
        self._accept_from(listener)
        return path

    def close(self, timeout_seconds: float) -> None:
        super().close(timeout_seconds)
        self._remove_folder()

    def _remove_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
        descriptor, self._folder_lock = self._folder_lock, None
        if descriptor is not None:
            os.close(descriptor)

    def _wrap(self, sock: socket.socket) -> Connection:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.geteuid():
            raise ConnectionLost(f"user {uid} may not map the memory of user {os.geteuid()}")
        return Connection(sock)

    def _greet(self, connection: Connection, tenant_store: ServedStore, deadline: float) -> None:
        layout = tenant_store.layout
        welcome = Welcome(
            Status.OK, self._boot_id, layout.page_bytes, layout.slot_bytes, tenant_store.num_slots
        )
        connection.send_fd(encode_welcome(welcome), tenant_store.memory_fd, deadline)

    def _session(self, connection: Connection, tenant_store: ServedStore) -> Session:
        return MemorySession(connection, tenant_store, self._limits, self._draining)


def _lock(folder: str) -> int | None:
    """A descriptor that holds a folder's lock; None where another has it. May raise OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _parents() -> list[str]:
    """Where the folder may lie, the first that can be written to."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    named = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - the folder in it is 0700 and new
    return list(dict.fromkeys((named, "/tmp", runtime, "/dev/shm")))  # noqa: S108 - likewise


def _remove_left_folders(parent: str) -> None:
    """Remove the folders of this user's killed servers. One without a socket is being made. May
    raise OSError."""
    for entry in os.scandir(parent):
        with contextlib.suppress(OSError):
            if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
                continue
            if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            descriptor = _lock(entry.path)
            if descriptor is None:
                continue
            try:
                if os.path.lexists(os.path.join(entry.path, _SOCKET)):
                    shutil.rmtree(entry.path)
            finally:
                os.close(descriptor)
