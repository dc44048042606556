# SPDX-License-Identifier: Apache-2.0
"""The event of a copy device that exists only in a test: it ends when the device says so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, kw_only=True)
class CopyEvent:
    """What `connector.device.base.Event` promises. A device whose copies can end while somebody
    waits for them says in `wait` how."""

    started: bool = False
    ended: bool = False
    failure: Exception | None = None

    def done(self) -> bool:
        return self.ended

    def wait(self, timeout_seconds: float) -> bool:
        return self.ended

    def error(self) -> Exception | None:
        return self.failure if self.ended else None

    def seconds(self) -> float:
        return 0.0
