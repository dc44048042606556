# SPDX-License-Identifier: Apache-2.0
"""`PictureBudget`: the limit of the memory that processed pictures of all requests take together.

A request reserves bytes before a picture is decoded. The bytes are free again after `free_bytes`,
or when the last reference to the reservation is gone, so no error leaves bytes reserved."""

from __future__ import annotations

import weakref

from ...tiers.settings.sizes import rough_size
from ...tiers.settings.values import MIB
from .picture_errors import PictureBudgetFull

MAX_PROCESSED_BYTES = 1024 * MIB
# The copies of processed pixels: the request's, and the encoded message to the engine core.
_NUM_COPIES = 2


class PictureBudget:
    """The reservations of all requests of a process, used in one event loop."""

    def __init__(self, max_bytes: int = MAX_PROCESSED_BYTES) -> None:
        self.max_bytes = max_bytes
        self._open: weakref.WeakSet[PictureReservation] = weakref.WeakSet()

    @property
    def reserved_bytes(self) -> int:
        return sum(each.num_bytes for each in self._open)

    def open_reservation(self) -> PictureReservation:
        """Return a reservation of no bytes for one request."""
        reservation = PictureReservation(self)
        self._open.add(reservation)
        return reservation


class PictureReservation:
    """The reserved bytes of one request."""

    def __init__(self, budget: PictureBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def reserve_pixels(self, num_bytes: int) -> None:
        """Reserve the memory for a picture of `num_bytes` of processed pixels. Raises
        PictureBudgetFull, and reserves nothing, if all requests would hold too much. If other
        requests hold nothing, any size fits."""
        more = _NUM_COPIES * num_bytes
        held, most = self._budget.reserved_bytes, self._budget.max_bytes
        if held > self.num_bytes and held + more > most:
            raise PictureBudgetFull(
                f"the server holds {rough_size(held)} of processed pictures, and with "
                f"{rough_size(more)} more it would hold more than {rough_size(most)}; send the "
                "request later"
            )
        self.num_bytes += more

    def free_bytes(self) -> None:
        """Reserve nothing any longer; the caller has dropped the pictures."""
        self.num_bytes = 0
