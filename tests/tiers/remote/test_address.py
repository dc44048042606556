# SPDX-License-Identifier: Apache-2.0
"""Addresses of cache servers."""

from __future__ import annotations

import pytest

from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.remote.membership import ServerAddress, is_address, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("grpc://host:1234", ServerAddress("host", 1234)),
        ("grpc://host", ServerAddress("host", 9400)),
        ("grpcs://a.example.org:9400/", ServerAddress("a.example.org", 9400, tls=True)),
        ("grpc://127.0.0.1", ServerAddress("127.0.0.1", 9400)),
        ("grpc://[::1]:9400", ServerAddress("::1", 9400)),
    ],
)
def test_an_address_is_read_and_written_the_same(text: str, address: ServerAddress) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address
    assert is_address(text)


def test_grpc_takes_brackets_around_ipv6() -> None:
    assert parse_address("grpc://[::1]").target == "[::1]:9400"


@pytest.mark.parametrize(
    "text",
    ["", "host:9400", "http://host", "grpc://", "grpc://:9400", "grpc://host:0", "grpc://host:70000",
     "grpc://host:port", "grpc://a b", "grpc://user@host", "grpc://host/path", "GRPC://host"],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(TierConfigError, match="looks like grpc://host:9400"):
        parse_address(text)


def test_names_of_tiers_are_no_addresses() -> None:
    assert not any(map(is_address, ("cpu", "ssd", "grpc", "http://host")))
