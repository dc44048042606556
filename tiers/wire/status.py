# SPDX-License-Identifier: Apache-2.0
"""The table of service errors: the gRPC status of each error, and the client's reaction to it.

    server  error ──► Ending: code, reason, message ──► the wire (the reason as trailing metadata)
    client  the wire ──► Verdict: the reason of a miss, and the client's next step

An engine treats every error as a miss, and counts the error by `reason`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import grpc

from ..errors import InvalidBlock, TierBusy, TierClosed, TierConfigError, TierError
from .frames import WireError

REASON_KEY = "stratakv-reason"  # key in the trailing metadata
WRONG_LAYOUT = "layout"
# Permanent reasons of failure, with which an engine should not start.
REFUSALS = (WRONG_LAYOUT, "unauthenticated", "version", "invalid")
_MESSAGE_CHARACTERS = 500

Code = grpc.StatusCode


class ServiceError(TierError):
    """The base class of the errors with which the server refuses a call."""


class Unauthenticated(ServiceError):
    """The call has no valid credentials."""


class WrongLayout(ServiceError):
    """The caller's block layout differs from the layout of the tenant's blocks."""


class NotAttached(ServiceError):
    """The tenant has no memory yet, because no client has attached with a block layout."""


class NotReady(ServiceError):
    """The tenant's memory is being allocated."""


class Draining(ServiceError):
    """The server is shutting down."""


class TooMuch(ServiceError):
    """The caller exceeds the server's limits on simultaneous work."""


class NoMemory(ServiceError):
    """The host lacks the memory that the tenant's settings require."""


class NoDisk(ServiceError):
    """The tenant's store on the disk cannot be opened."""


class ReadOnly(ServiceError):
    """The server only loads blocks, and neither stores nor deletes blocks."""


class TooLate(ServiceError):
    """The deadline of the call, or the server's deadline, has passed."""


class Retry(Enum):
    """The client's next step after a failed call."""

    LATER = "later"  # the same call again, after a pause
    ATTACH = "attach"  # attach, then the same call again
    TICKET = "ticket"  # get a new ticket or lease, then the same call again
    RARELY = "rarely"  # an operator has to change a setting; try again at long intervals
    NEVER = "never"  # the same call will fail again


class Ending(NamedTuple):
    """The status, reason and message that the server sends at the end of a failed call."""

    code: Any  # a grpc.StatusCode
    reason: str
    message: str


class Verdict(NamedTuple):
    """The reason of a failed call, and the client's next step."""

    reason: str
    retry: Retry


@dataclass(frozen=True, slots=True)
class _Row:
    error: type[BaseException]
    code: Any
    reason: str
    retry: Retry
    cure: str


# The first row with a class of which an error is an instance is the error's row.
TABLE = (
    _Row(Unauthenticated, Code.UNAUTHENTICATED, "unauthenticated", Retry.RARELY,
         "send a known token as `authorization: Bearer ...`, or a client certificate"),
    _Row(WrongLayout, Code.FAILED_PRECONDITION, WRONG_LAYOUT, Retry.RARELY,
         "give the engines one model and block size, or the tenant another pool"),
    _Row(NotAttached, Code.FAILED_PRECONDITION, "not_attached", Retry.ATTACH,
         "call Attach first"),
    _Row(NotReady, Code.UNAVAILABLE, "not_ready", Retry.LATER, "ask again in a moment"),
    _Row(Draining, Code.UNAVAILABLE, "draining", Retry.LATER, "ask again when it is back"),
    _Row(TierClosed, Code.UNAVAILABLE, "draining", Retry.LATER, "ask again when it is back"),
    _Row(TooMuch, Code.RESOURCE_EXHAUSTED, "busy", Retry.LATER, "ask again later, or for less"),
    _Row(TierBusy, Code.RESOURCE_EXHAUSTED, "busy", Retry.LATER, "ask again later, or for less"),
    _Row(NoMemory, Code.RESOURCE_EXHAUSTED, "memory", Retry.RARELY,
         "give the tenant less memory, or the host more"),
    _Row(MemoryError, Code.RESOURCE_EXHAUSTED, "memory", Retry.LATER,
         "give the host more memory, or the tenants less"),
    _Row(NoDisk, Code.RESOURCE_EXHAUSTED, "disk", Retry.RARELY,
         "mend the directory of the SSD store, or start the server without it"),
    _Row(ReadOnly, Code.FAILED_PRECONDITION, "read_only", Retry.NEVER,
         "ask the engine whose blocks they are"),
    _Row(TierConfigError, Code.FAILED_PRECONDITION, "settings", Retry.RARELY,
         "mend the server's settings"),
    _Row(InvalidBlock, Code.INVALID_ARGUMENT, "invalid", Retry.NEVER,
         "see the comments of cache_service.proto"),
    _Row(WireError, Code.INVALID_ARGUMENT, "invalid", Retry.NEVER,
         "see the comments of cache_service.proto"),
    _Row(TooLate, Code.DEADLINE_EXCEEDED, "deadline", Retry.LATER,
         "ask for less, or wait longer"),
    _Row(TimeoutError, Code.DEADLINE_EXCEEDED, "deadline", Retry.LATER,
         "ask for less, or wait longer"),
    _Row(OSError, Code.RESOURCE_EXHAUSTED, "disk", Retry.LATER,
         "see the server's log, and whether its disk is full"),
    _Row(Exception, Code.INTERNAL, "internal", Retry.LATER, "see the server's log"),
)  # fmt: skip

# Verdicts for a status without REASON_KEY, which comes from grpc itself or from a proxy.
_BY_CODE = {
    Code.OK: Verdict("none", Retry.NEVER),
    Code.CANCELLED: Verdict("cancelled", Retry.LATER),
    Code.UNKNOWN: Verdict("internal", Retry.LATER),
    Code.INVALID_ARGUMENT: Verdict("invalid", Retry.NEVER),
    Code.DEADLINE_EXCEEDED: Verdict("deadline", Retry.LATER),
    Code.NOT_FOUND: Verdict("version", Retry.RARELY),
    Code.ALREADY_EXISTS: Verdict("internal", Retry.LATER),
    Code.PERMISSION_DENIED: Verdict("unauthenticated", Retry.RARELY),
    Code.UNAUTHENTICATED: Verdict("unauthenticated", Retry.RARELY),
    Code.RESOURCE_EXHAUSTED: Verdict("busy", Retry.LATER),
    Code.FAILED_PRECONDITION: Verdict("settings", Retry.RARELY),
    Code.ABORTED: Verdict("busy", Retry.LATER),
    Code.OUT_OF_RANGE: Verdict("invalid", Retry.NEVER),
    Code.UNIMPLEMENTED: Verdict("version", Retry.RARELY),
    Code.INTERNAL: Verdict("internal", Retry.LATER),
    Code.UNAVAILABLE: Verdict("unavailable", Retry.LATER),
    Code.DATA_LOSS: Verdict("corrupt", Retry.LATER),
}

_BY_REASON = {row.reason: Verdict(row.reason, row.retry) for row in reversed(TABLE)}


def ending_of(error: BaseException) -> Ending:
    """Return the ending of a call that raised `error`. An unexpected error's text is left out."""
    row = next(row for row in TABLE if isinstance(error, row.error))
    says_nothing = row.error in (Exception, OSError, MemoryError)
    what = f"the server failed ({row.reason})" if says_nothing else str(error)
    what = what[:_MESSAGE_CHARACTERS] or type(error).__name__
    return Ending(row.code, row.reason, f"{what}; {row.cure}")


def verdict_of(error: Any) -> Verdict:
    """Return the verdict on a grpc.RpcError, by the reason in its metadata or its status code."""
    for key, value in error.trailing_metadata() or ():
        if key == REASON_KEY and value in _BY_REASON:
            return _BY_REASON[value]
    return _BY_CODE.get(error.code(), _BY_CODE[Code.UNKNOWN])
