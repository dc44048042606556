# SPDX-License-Identifier: Apache-2.0
"""Admission filters, which decide whether a block is worth a write to disk. Imports no engine code.

base        the contract of a filter, and the filter that admits every block
filters     filters by name, and filters without a model     reuse    the filter with a model
contract    the check that any filter has to pass"""

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
