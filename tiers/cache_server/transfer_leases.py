# SPDX-License-Identifier: Apache-2.0
"""What a room gives out: blocks on their way out or in, and word of those that come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..hierarchy.promotions import LoadTicket
from ..hierarchy.tickets import StoreTicket
from ..wire.frames import State


class Listener(Protocol):
    """Who wants to know of blocks that come and go, by the tenant's own keys. Called while the
    room is held, so it must return at once."""

    def stored(self, keys: Sequence[bytes]) -> None:
        """Blocks can be found from now on."""

    def removed(self, keys: Sequence[bytes]) -> None:
        """Blocks cannot be found any more."""

    def cleared(self) -> None:
        """No block can be found any more."""


@dataclass(slots=True, eq=False)
class Loan:
    """Blocks on their way out. After `Room.wait`, `slots[i]` is where `keys[i]` lies, None for a
    miss, until `Room.end_load`."""

    keys: list[bytes]
    slots: list[int | None]
    stored: list[bytes]
    ticket: LoadTicket


@dataclass(slots=True, eq=False)
class Intake:
    """Blocks on their way in. `slots[i]` is to be filled where `states[i]` is WANTED, else None."""

    keys: list[bytes]
    states: list[State]
    slots: list[int | None]
    stored: list[bytes]
    ticket: StoreTicket
