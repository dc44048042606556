# SPDX-License-Identifier: Apache-2.0
"""`is_public_address`: the check of an IP address before a picture is fetched from the address.

Addresses that contain another address (IPv4-mapped, NAT64, 6to4, Teredo) are refused, because a
router could forward packets for such an address into this server's network."""

from __future__ import annotations

import ipaddress

_PUBLIC_IPV6 = ipaddress.IPv6Network("2000::/3")
# Refused networks that some versions of Python report as public.
_REFUSED = tuple(
    ipaddress.ip_network(text)
    for text in (
        "192.0.0.0/24", "192.88.99.0/24", "100.64.0.0/10", "198.18.0.0/15",
        "2001::/23",  # protocol assignments, such as Teredo and ORCHID
        "2001:db8::/32", "2002::/16", "3fff::/20",
    )
)  # fmt: skip


def is_public_address(text: str) -> bool:
    """Return whether `text` is an IP address of the public internet, without an IPv6 zone."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None or address not in _PUBLIC_IPV6:
            return False
    is_special = (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
    )
    is_refused = any(address in network for network in _REFUSED)
    return address.is_global and not is_special and not is_refused
