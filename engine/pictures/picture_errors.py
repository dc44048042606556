# SPDX-License-Identifier: Apache-2.0
"""Errors about a picture of a request. The caller adds the picture's place in front of an error's
text, as in "picture 2 of message 1: its file ends early; ..."."""

from __future__ import annotations


class PictureError(ValueError):
    """A picture is refused. The text has the expected value, the given value and a remedy."""


class PictureOverload(RuntimeError):
    """The server has no resources for a picture now; the same request may succeed later."""


class PicturePoolFull(PictureOverload):
    """All threads of a pool are busy and its queue is full."""


class PictureBudgetFull(PictureOverload):
    """The processed pictures of all requests take all memory that they may take."""
