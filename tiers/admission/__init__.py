# SPDX-License-Identifier: Apache-2.0
"""Keeps what decides whether a block is worth writing; never imports torch or the engine.

base    the promise of a filter, and the one that admits everything
choice  filters by name        filters, reuse    the others
contract    what any filter has to pass
"""

from .base import AdmissionFilter, AdmitAll
from .filters import DEFAULT_FILTER, FILTERS, WriteBudget, known_filters, make_filter

__all__ = [
    "DEFAULT_FILTER",
    "FILTERS",
    "AdmissionFilter",
    "AdmitAll",
    "WriteBudget",
    "known_filters",
    "make_filter",
]
