# SPDX-License-Identifier: Apache-2.0
"""The table of statuses is complete, both ways, and every message says what to do."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import grpc
import pytest

from stratakv.tiers.wire import status
from stratakv.tiers.wire.frames import WireError
from stratakv.tiers.wire.status import (
    REASON_KEY,
    TABLE,
    Retry,
    ending_of,
    verdict_of,
)

_LOADED_BY_A_SERVER = """
import sys, stratakv.tiers.cache_server.server
ours = ("stratakv.tiers.cache_server.", "stratakv.tiers.wire.")
print(*(name for name in sys.modules if name.startswith(ours)))
"""
OURS = ("stratakv.tiers.cache_server.", "stratakv.tiers.wire.", "stratakv.tiers.errors")
# Never raised themselves, and what ends a data connection rather than a call.
NO_ENDING_OF_A_CALL = {"TierError", "ServiceError", "ConnectionLost", "NotKnown"}


def _every_error() -> list[type[Exception]]:
    """All error classes of the service's modules that a server loads, and those of all tiers."""
    done = subprocess.run(
        [sys.executable, "-c", _LOADED_BY_A_SERVER],
        cwd="/", capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    modules = [importlib.import_module(name) for name in done.stdout.split()]
    return sorted(
        {
            value
            for module in modules
            for value in vars(module).values()
            if inspect.isclass(value)
            and issubclass(value, Exception)
            and value.__module__.startswith(OURS)
        },
        key=lambda error: error.__name__,
    )


def test_every_error_has_a_row_of_its_own() -> None:
    in_table = {row.error for row in TABLE} - {Exception, OSError}
    found = _every_error()
    assert {error.__name__ for error in found} >= NO_ENDING_OF_A_CALL | {"TierBusy", "WireError"}
    for error in found:
        if error.__name__ not in NO_ENDING_OF_A_CALL:
            assert any(issubclass(error, row) for row in in_table), error


def test_no_row_hides_another() -> None:
    for place, row in enumerate(TABLE):
        for earlier in TABLE[:place]:
            assert not issubclass(row.error, earlier.error), (row.error, earlier.error)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.error.__name__)
def test_a_status_carries_a_reason_and_a_cure(row) -> None:
    ending = ending_of(row.error("what happened"))
    assert (ending.code, ending.reason) == (row.code, row.reason)
    assert row.cure and ending.message.endswith(f"; {row.cure}")
    assert row.code not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)


def test_what_nobody_foresaw_is_not_told_to_clients() -> None:
    for error in (KeyError("/etc/secret"), OSError(28, "no space", "/etc/secret")):
        assert "secret" not in ending_of(error).message


def test_a_long_message_is_cut() -> None:
    assert len(ending_of(WireError("x" * 10_000)).message) < 1000


class _Error(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, reason: str | None) -> None:
        self._code = code
        self._reason = reason

    def code(self) -> grpc.StatusCode:
        return self._code

    def trailing_metadata(self) -> tuple[tuple[str, str], ...] | None:
        return None if self._reason is None else ((REASON_KEY, self._reason),)


@pytest.mark.parametrize("code", grpc.StatusCode, ids=lambda code: code.name)
def test_a_client_knows_every_code(code) -> None:
    assert code in status._BY_CODE
    verdict = verdict_of(_Error(code, None))
    assert verdict == status._BY_CODE[code]
    assert verdict == verdict_of(_Error(code, "a reason of a newer server"))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.error.__name__)
def test_a_client_makes_of_it_what_the_server_meant(row) -> None:
    verdict = verdict_of(_Error(row.code, row.reason))
    assert verdict.reason == row.reason
    first = next(each for each in TABLE if each.reason == row.reason)
    assert verdict.retry is first.retry


def test_reasons_are_labels() -> None:
    reasons = {row.reason for row in TABLE}
    assert all(reason.isidentifier() and reason.islower() for reason in reasons)
    assert len(reasons) < 25


def test_only_the_callers_own_faults_are_final() -> None:
    final = {row.reason for row in TABLE if row.retry is Retry.NEVER}
    assert final == {"invalid", "read_only"}
