# SPDX-License-Identifier: Apache-2.0
"""Sizes come out as they were typed, and as exactly the number that they are."""

from __future__ import annotations

import random

import pytest

from stratakv.tiers.settings import readers
from stratakv.tiers.settings.sizes import exact_size, rough_size, show_size


@pytest.mark.parametrize(
    "typed",
    [
        "20GiB", "4GiB", "512MiB", "16MiB", "64KiB", "1TiB", "1.5GiB", "1.25GiB", "102.4MiB",
        "20GB", "1.5GB", "5MB", "100kB", "1025MiB", "1048576TiB",
    ],
)  # fmt: skip
def test_a_size_is_shown_as_it_was_typed(typed: str) -> None:
    assert exact_size(readers.size("it", typed)) == show_size(readers.size("it", typed)) == typed


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [
        (0, "0 bytes"), (1, "1 bytes"), (1023, "1023 bytes"), (4095, "4095 bytes"),
        (1536 * 1024**2, "1.5GiB"), (65_537, "65537 bytes (64 KiB)"),
        (5 * 2**30 + 1, "5368709121 bytes (5 GiB)"),
    ],
)  # fmt: skip
def test_what_has_no_short_text_is_a_number(size_bytes: int, shown: str) -> None:
    assert show_size(size_bytes) == shown


def test_an_exact_size_is_read_back(rng: random.Random) -> None:
    for _ in range(5000):
        size_bytes = int(rng.randrange(1, 9999) / 10 ** rng.randrange(4) * 1024 ** rng.randrange(5))
        text = exact_size(size_bytes)
        assert text is None or readers.size("it", text) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [
        (500, "500 bytes"), (2**20 - 1, "1024 KiB"), (20 * 2**30, "20 GiB"),
        (20 * 2**30 - 4096, "20 GiB"), (1_500_000, "1.43 MiB"), (2**60, "1048576 TiB"),
    ],
)  # fmt: skip
def test_a_rough_size_has_three_figures(size_bytes: int, shown: str) -> None:
    assert rough_size(size_bytes) == shown
