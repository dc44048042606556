# SPDX-License-Identifier: Apache-2.0
"""Exchanges functions of the product for as long as a measurement lasts. For comparisons with what
the product does not offer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def swapped(owner: object, **values: object) -> Iterator[None]:
    """Attributes of a module or a class have other values meanwhile."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
