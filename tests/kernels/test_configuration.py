# SPDX-License-Identifier: Apache-2.0
"""A configuration that could not be compiled as written is refused where it is written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stratakv.kernels.configuration import Configuration, ConfigurationRefused


def _make(**changes: Any) -> Configuration:
    arguments: dict[str, Any] = {
        "name": "example.bf16",
        "function": SimpleNamespace(arg_names=["x", "stride", "size"]),
        "signature": {"x": "*bf16", "stride": "i64"},
        "constexprs": {"size": 16},
        "multiples_of_16": frozenset({"stride"}),
    }
    return Configuration(**{**arguments, **changes})


def test_a_whole_one_is_taken() -> None:
    assert _make().min_capability == (8, 0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": "Has Spaces"}, "expected a name of"),
        ({"signature": {"x": "bf61", "stride": "i64"}}, "for x, got 'bf61'"),
        ({"constexprs": {"size": 16, "stride": 1}}, r"both passed and constant: \['stride'\]"),
        ({"constexprs": {}}, r"missing \['size'\], unknown \[\]"),
        ({"constexprs": {"size": 16, "sise": 1}}, r"missing \[\], unknown \['sise'\]"),
        ({"multiples_of_16": frozenset({"size"})}, r"not passed: \['size'\]"),
    ],
)
def test_each_mistake_is_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationRefused, match=text):
        _make(**changes)
