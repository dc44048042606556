# SPDX-License-Identifier: Apache-2.0
"""Errors about a picture of a request. The caller puts the picture's place before the sentence, as
in "picture 2 of message 1: its file ends early; ..."."""

from __future__ import annotations


class PictureError(ValueError):
    """A picture that is refused. The text says what was expected, what came and what to do."""


class PicturePoolFull(RuntimeError):
    """The threads and the queue of a pool are taken; the same request may succeed later."""
