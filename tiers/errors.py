# SPDX-License-Identifier: Apache-2.0
"""The errors a tier may raise, and who is at fault in each.

    TierError
    ├── InvalidBlock     the caller gave a key, layout or buffer that cannot be right
    ├── TierConfigError  the operator gave a path, size or option that cannot work; carries the cure
    │   └── TierDown     or it may work later: the place is not there, or does not answer
    ├── TierBusy         the tier's bounded queue is full; drop the store or ask again
    └── TierClosed       the tier was closed; nothing more will happen

A damaged, missing or misplaced record is no error: the answer is a miss, and it is counted.
The connector turns every TierError on the data path into a miss with a reason.
"""


class TierError(Exception):
    """Base of everything a tier raises."""


class InvalidBlock(TierError, ValueError):
    """A key, layout or buffer that no caller should have made."""


class TierConfigError(TierError, ValueError):
    """A setting that cannot work; the message says what was expected, what came, what to do."""


class TierDown(TierConfigError):
    """What the tier needs is not there at present, such as a mount or a server. Opening it later
    may succeed without anybody changing a setting."""


class TierBusy(TierError):
    """The queue of the tier is full."""


class TierClosed(TierError):
    """The tier was closed."""
