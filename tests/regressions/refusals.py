# SPDX-License-Identifier: Apache-2.0
"""A command that is refused, as a person sees it."""

from __future__ import annotations

import pytest

from stratakv.engine.cli.main import main


def refused(words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Refused with one line that has all of these."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    for part in parts:
        assert part in err
    return err
