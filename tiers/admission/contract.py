# SPDX-License-Identifier: Apache-2.0
"""A check that an admission filter keeps the contract in `base.py`.

Authors of filters, also outside this project, call `check_filter_contract` with their filter's
factory. The check does not judge which blocks are worth writing."""

from __future__ import annotations

from collections.abc import Callable

from ..contract import ContractBroken
from .base import AdmissionFilter

BLOCKS = 16  # blocks that the tier below can hold
_PROMPTS = 60


def check_filter_contract(make: Callable[[int], AdmissionFilter]) -> None:
    """Check what `Hierarchy` relies on. `make` takes the number of blocks that the tier below can
    hold. Raises ContractBroken with the expected and the actual value."""
    admission = make(BLOCKS)
    if not isinstance(admission, AdmissionFilter):
        raise ContractBroken(f"expected an AdmissionFilter, got {type(admission).__name__}")
    if not isinstance(admission.learns, bool):
        raise ContractBroken(f"expected `learns` to be True or False, got {admission.learns!r}")
    _check_verdicts(admission, [], 0.0)
    for number in range(_PROMPTS):
        # Chains of repeated prompts, some of which are not passed to `observe`.
        chain = [b"%d/%d" % (number % 7, depth) for depth in range(1 + number % 9)]
        now = 0.5 * number
        if number % 3:
            admission.observe(chain, now)
        _check_verdicts(admission, [*chain[::-1], b"new %d" % number], now)
        admission.promoted(number % 4)


def _check_verdicts(admission: AdmissionFilter, keys: list[bytes], now: float) -> None:
    verdicts = admission.admit(keys, now)
    if not isinstance(verdicts, list) or {bool}.union(map(type, verdicts)) != {bool}:
        raise ContractBroken(f"expected a list of True and False, got {verdicts!r}")
    if len(verdicts) != len(keys):
        raise ContractBroken(f"expected a verdict for each of {len(keys)} keys, got {verdicts!r}")
