# SPDX-License-Identifier: Apache-2.0
"""ServerLink: the connection state of one cache server, and the blocks that the server reported.

    down ──attach──► up ──a call fails──► down          again and again, with growing pauses
      └──refused (credentials, layout, version)──► told once, tried rarely

A restarted server has a new boot id, at which the link drops the record of the server's blocks.
Transfers run on their own threads (`transfers.py`), look-ups on grpc's threads."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import grpc

from ...proto.v1 import cache_service_pb2 as messages
from ..block import BlockLayout
from ..errors import TierConfigError
from ..wire.frames import MAX_KEYS, MAX_LEASE_SECONDS, State, pack_keys
from ..wire.protobuf_messages import layout_message
from ..wire.rpc import Stub, make_channel
from ..wire.sockets import ConnectionLost
from ..wire.status import Retry, verdict_of
from .credentials import Credentials
from .membership import ServerAddress
from .presence_cache import PresenceCache
from .remote_settings import RemoteSettings
from .transfer_queue import RemoteError, RemoteLate
from .transports.block_connection import BlockConnection
from .transports.data_client import DataConnection
from .transports.memory_client import MemoryConnection
from .transports.stream_client import StreamConnection

log = logging.getLogger(__name__)

MAX_QUESTIONS = 64  # unanswered look-ups at a time
_OPENING_SHARE = 0.4  # share of the remaining time, for each transport
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0
_REFUSED_PAUSE = 30.0
_MOST_TOLD = 32  # most refusals in `_told`
_READ_ONLY = (
    "it is an engine, which stores no blocks of others; name it in --kv-peers, not in --kv-offload"
)
_REFUSALS = (Retry.RARELY, Retry.NEVER)
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(address: ServerAddress, credentials: Credentials) -> Any:
    """Make a channel, which connects at its first call. Raises TierConfigError for bad files."""
    options: list[tuple[str, int | str]] = list(_CHANNEL_OPTIONS)
    if not address.tls:
        return make_channel(address.target, None, options)
    if credentials.server_name is not None:
        options.append(("grpc.ssl_target_name_override", credentials.server_name))
    return make_channel(address.target, credentials.grpc(), options)


def all_up(links: Sequence[ServerLink], timeout_seconds: float) -> bool:
    deadline = time.monotonic() + timeout_seconds
    return all(link.wait_up(max(0.0, deadline - time.monotonic())) for link in links)


def errors_of(links: Sequence[ServerLink]) -> dict[str, int]:
    errors: Counter[str] = Counter()
    for link in links:
        errors.update(dict(link.errors))
    return dict(errors)


class ServerLink:
    """The link to one server. A background thread attaches to the server. Thread-safe."""

    def __init__(
        self, address: ServerAddress, layout: BlockLayout, settings: RemoteSettings
    ) -> None:
        self.address = address
        self.presence = PresenceCache()
        self.capacity_bytes = 0
        self.errors: dict[str, int] = {}
        self._layout = layout
        self._settings = settings
        self._changed = threading.Condition()
        self.was_up = False  # whether the server was ever attached
        self._is_up = False
        self._closed = False
        self._told: set[str] = set()  # refusals logged since the last attachment
        self._has_told_of_memory = False
        self._boot_id = b""
        self._questions = 0
        self._channel: Any = None
        self._stub: Any = None
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._attacher = threading.Thread(
            target=self._attach_for_ever, name="stratakv-remote-link", daemon=True
        )
        self._attacher.start()

    @property
    def is_up(self) -> bool:
        """Whether the server is attached and no call has failed since."""
        return self._is_up

    def wait_up(self, timeout_seconds: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_up or self._closed, timeout_seconds)
            return self._is_up

    def count_error(self, reason: str) -> None:
        with self._changed:
            self.errors[reason] = self.errors.get(reason, 0) + 1

    def mark_lost(self, boot_id: bytes | None = None) -> None:
        """Mark the link as down, to attach again. With `boot_id`, only if this id is new."""
        with self._changed:
            if boot_id is None or boot_id != self._boot_id:
                self._is_up = False
                self._changed.notify_all()

    def prefetch_lookup(self, keys: Sequence[bytes]) -> list[Future[None]]:
        """Look blocks up in few calls. Futures end with answers in `presence` or an error."""
        asked = self.presence.to_ask(keys) if self._is_up else []
        futures = []
        for start in range(0, len(asked), MAX_KEYS):
            with self._changed:
                if self._questions >= MAX_QUESTIONS:
                    break
                self._questions += 1
            futures.append(self._look_up(asked[start : start + MAX_KEYS]))
        return futures

    def pin_blocks(self, keys: Sequence[bytes], seconds: float) -> Future[int]:
        """Pin up to MAX_BLOCKS blocks for `seconds`, at most MAX_LEASE_SECONDS. The result is the
        number of leading blocks pinned, or a RemoteError if the server does not answer."""
        result: Future[int] = Future()
        lease_ms = max(1, int(1000 * min(seconds, MAX_LEASE_SECONDS)))
        request = messages.PinRequest(keys=pack_keys(keys), lease_ms=lease_ms)

        def done(call: Any) -> None:
            try:
                prefix = int(call.result().prefix)
            except grpc.RpcError as error:
                if verdict_of(error).reason == "busy":
                    # The server has no lease left, and keeps the blocks as long as other new
                    # blocks.
                    self.count_error("busy")
                    result.set_result(len(keys))
                else:
                    result.set_exception(self._failed(error))
            except Exception as error:  # noqa: BLE001 - the call was ended
                result.set_exception(RemoteError(f"{self.address}: the lease was ended: {error}"))
            else:
                result.set_result(prefix)

        try:
            if self._stub is None or not self._is_up:
                raise RemoteError(f"{self.address} cannot be reached")
            timeout = self._settings.lookup_seconds
            call = self._stub.pin.future(request, timeout=timeout, metadata=self._metadata)
            call.add_done_callback(done)
        except RemoteError as error:
            result.set_exception(error)
        except Exception as error:  # noqa: BLE001 - another thread closed the channel
            result.set_exception(RemoteError(f"{self.address}: {error}"))
        return result

    def stream_events(self) -> Iterator[Any]:
        """Yield the tenant's WatchEvents until `close`. Raises RemoteError, grpc.RpcError."""
        stub = self._stub
        if stub is None or not self._is_up:
            raise RemoteError(f"{self.address} cannot be reached")
        try:
            events: Iterator[Any] = stub.watch(messages.WatchRequest(), metadata=self._metadata)
        except ValueError as error:  # the channel is being replaced
            raise RemoteError(f"{self.address}: {error}") from error
        return events

    def connect(self, deadline: float) -> BlockConnection:
        """Open a connection for blocks: shared memory on the same host, else a socket, else gRPC.
        Sets `is_fallback` if gRPC is used because another transport failed. Raises RemoteError."""
        if not self._is_up:
            raise RemoteError(f"{self.address} cannot be reached")
        why = ""
        for opener in (self._open_memory, self._open_data):
            # Each attempt has a share of the time: a firewall that drops packets leaves time for
            # gRPC.
            now = time.monotonic()
            try:
                connection = opener(now + _OPENING_SHARE * (deadline - now))
            except (ConnectionLost, TierConfigError) as error:
                why = f"{why}; {error}"
                continue
            if connection is not None:
                self._tell_of_memory(why, connection.kind)
                return self._checked(connection)
        if time.monotonic() >= deadline:
            raise RemoteLate(f"{self.address} did not answer in time{why}")
        if why:
            log.warning("%s: no data connection%s; blocks go through gRPC", self.address, why)
        stub = self._stub
        if stub is None:
            raise RemoteError(f"{self.address} cannot be reached")
        settings = self._settings
        streams = StreamConnection(
            stub,
            self._metadata,
            self._layout,
            self._boot_id,
            settings.tag_key,
            settings.namespace,
        )
        streams.is_fallback = bool(why)
        return streams

    def delete_blocks(self, keys: Sequence[bytes], *, all_blocks: bool = False) -> None:
        request = messages.DeleteRequest(keys=pack_keys(keys), all=all_blocks)
        self.call_server("delete", request, self._settings.store_seconds)

    def close(self) -> None:
        """Close the link. Calls under way fail. Idempotent."""
        with self._changed:
            self._closed = True
            self._is_up = False
            self._changed.notify_all()
        self._attacher.join(self._settings.attach_seconds + 1)
        if self._channel is not None:
            self._channel.close()

    def call_server(self, name: str, request: Any, seconds: float) -> Any:
        """Make one call and return its response. Raises RemoteError if the call fails, and marks
        the link as down unless the server was busy or the request invalid."""
        stub = self._stub
        if stub is None or not self._is_up:
            raise RemoteError(f"{self.address} cannot be reached")
        try:
            return getattr(stub, name)(request, timeout=seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._failed(error) from error
        except ValueError as error:  # the channel is being replaced
            raise RemoteError(f"{self.address}: {error}") from error

    def _failed(self, error: Any) -> RemoteError:
        """Return the RemoteError for a failed call. Counts the error, and marks the link as down
        unless the server was busy or the request invalid."""
        verdict = verdict_of(error)
        self.count_error(verdict.reason)
        if verdict.reason not in ("busy", "invalid"):
            self.mark_lost()
        kind = RemoteLate if verdict.reason == "deadline" else RemoteError
        return kind(f"{self.address}: {error.details() or verdict.reason}")

    def _look_up(self, keys: list[bytes]) -> Future[None]:
        result: Future[None] = Future()
        self.presence.asked(keys)
        seconds = self._settings.lookup_seconds
        request = messages.LookupRequest(keys=pack_keys(keys))

        def done(call: Any) -> None:
            with self._changed:
                self._questions -= 1
            try:
                response = call.result()
                hit = int(State.HIT)
                hits = [byte == hit for byte in response.states]
                if len(hits) != len(keys):
                    raise RemoteError(f"{self.address}: {len(hits)} answers to {len(keys)} keys")
            except grpc.FutureCancelledError:
                self.presence.answered(keys, None)
                result.set_exception(RemoteError(f"{self.address}: the look-up was ended"))
            except grpc.RpcError as error:
                self.presence.answered(keys, None)
                result.set_exception(self._failed(error))
            except RemoteError as error:
                self.presence.answered(keys, None)
                result.set_exception(error)
            else:
                self.mark_lost(response.boot_id)
                self.presence.answered(keys, hits if self._is_up else None)
                result.set_result(None)

        try:
            call = self._stub.lookup.future(request, timeout=seconds, metadata=self._metadata)
            call.add_done_callback(done)
        except Exception as error:  # noqa: BLE001 - a channel that was closed under us
            with self._changed:
                self._questions -= 1
            self.presence.answered(keys, None)
            result.set_exception(RemoteError(f"{self.address}: {error}"))
        return result

    def _open_memory(self, deadline: float) -> BlockConnection | None:
        offer = self._offer(deadline) if self._settings.shares_memory else None
        if offer is None or not offer.unix_path:
            return None
        return MemoryConnection.open(
            offer.unix_path,
            offer.ticket,
            self._layout,
            deadline,
            tag_key=self._settings.tag_key,
            namespace=self._settings.namespace,
        )

    def _open_data(self, deadline: float) -> BlockConnection | None:
        offer = self._offer(deadline)
        if not offer.port:
            return None
        credentials = self._settings.credentials
        return DataConnection.open(
            self.address.host,
            offer.port,
            offer.ticket,
            self._layout,
            deadline,
            tls=credentials.context() if self.address.tls else None,
            server_name=credentials.server_name,
            tag_key=self._settings.tag_key,
            namespace=self._settings.namespace,
        )

    def _offer(self, deadline: float) -> Any:
        left = max(0.001, deadline - time.monotonic())
        return self.call_server("open_data", messages.OpenDataRequest(), left)

    def _checked(self, connection: BlockConnection) -> BlockConnection:
        if connection.boot_id != self._boot_id:
            connection.close()
            self.mark_lost()
            raise RemoteError(f"{self.address} was restarted")
        log.info("%s: blocks go through %s", self.address, connection.kind)
        return connection

    def _attach_for_ever(self) -> None:
        pause, longest = _FIRST_PAUSE, _LONGEST_PAUSE
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_up or self._closed)
                if self._closed:
                    return
            retry = self._attach()
            if retry is None:
                pause = _FIRST_PAUSE
                continue
            # After a refusal the first pause is short too: the refusal may end soon if servers are
            # being replaced.
            before, longest = longest, _REFUSED_PAUSE if retry in _REFUSALS else _LONGEST_PAUSE
            pause = _FIRST_PAUSE if longest != before else min(2 * pause, longest)
            with self._changed:
                # With jitter, engines that lost the same server return at different times.
                self._changed.wait_for(
                    lambda: self._closed,
                    pause * random.uniform(0.5, 1.0),  # noqa: S311 - no secret
                )

    def _attach(self) -> Retry | None:
        """Try to attach once. Return None on success, else when to try again."""
        try:
            if self._channel is None:
                self._metadata = self._settings.credentials.metadata(self.address)
                self._channel = open_channel(self.address, self._settings.credentials)
                self._stub = Stub(self._channel)
            request = messages.AttachRequest(layout=layout_message(self._layout))
            response = self._stub.attach(
                request, timeout=self._settings.attach_seconds, metadata=self._metadata
            )
        except grpc.RpcError as error:
            verdict = verdict_of(error)
            self.count_error(verdict.reason)
            if verdict.reason != "not_ready":  # a server is `not_ready` while it allocates memory
                said = str(error.details())
                if verdict.reason == "unauthenticated":
                    said += self._settings.credentials.missing(self.address)
                self._warn_not_used(verdict.retry, said)
                # A new channel reads the credential files again: a handshake that fails because of
                # old files looks like an absent server. An old connection whose peer vanished would
                # stay silent until its keepalive fails.
                self._close_channel()
            return verdict.retry
        except TierConfigError as error:
            self._warn_not_used(Retry.RARELY, str(error))
            return Retry.RARELY
        except Exception as error:  # the thread must go on: no other one attaches
            if self._is_news(str(error)):
                log.exception("%s cannot be attached", self.address)
            self.count_error("internal")
            self._close_channel()
            return Retry.LATER
        if response.is_read_only and self._settings.stores:
            self.count_error("read_only")
            self._warn_not_used(Retry.RARELY, _READ_ONLY)
            return Retry.RARELY
        with self._changed:
            if response.boot_id != self._boot_id:
                self.presence.clear()
            self._boot_id = response.boot_id
            self.capacity_bytes = response.capacity_bytes
            self.was_up = True
            self._is_up = not self._closed
            self._told.clear()
            self._changed.notify_all()
        log.info("%s is attached", self.address)
        return None

    def _tell_of_memory(self, why: str, kind: str) -> None:
        """Count each connection that failed to use shared memory, and log the first failure."""
        if why:
            self.count_error("no_memory")
        if why and not self._has_told_of_memory:
            self._has_told_of_memory = True
            log.warning("%s: no shared memory%s; blocks go through %s", self.address, why, kind)

    def _close_channel(self) -> None:
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            channel.close()

    def _is_news(self, what: str) -> bool:
        """Whether `what` was not logged since the last attachment. Records `what` as logged."""
        if what in self._told:
            return False
        if len(self._told) >= _MOST_TOLD:  # texts that differ each time
            self._told.clear()
        self._told.add(what)
        return True

    def _warn_not_used(self, retry: Retry, what: str) -> None:
        """Log a warning once for each cause, not for each attempt."""
        if retry is Retry.ATTACH or not self._is_news(what):
            return
        pause = f"; tried again, later every {_REFUSED_PAUSE:g} s" if retry in _REFUSALS else ""
        log.warning("%s is not used for now: %s%s", self.address, what, pause)
