# SPDX-License-Identifier: Apache-2.0
"""A package with logits processors as pip leaves it: a module, and metadata with entry points."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stratakv.engine.sampling.processor_loading import ENTRY_POINTS

MODULE = "strata_processors"
SOURCE = '''
import torch

from stratakv.engine.sampling.processors.adapter import AdapterLogitsProcessor
from stratakv.engine.sampling.processors.base import StatefulProcessor


class Only(StatefulProcessor):
    """Bans all tokens but one, which may be told to raise."""

    @classmethod
    def validate_params(cls, params):
        args = params.extra_args or {}
        if not isinstance(args.get("only", 0), int):
            raise ValueError(f"only must be a token id, got {args['only']!r}")

    @classmethod
    def applies_to(cls, params):
        return "only" in (params.extra_args or {})

    def _state_of(self, added):
        args = added.params.extra_args or {}
        if args.get("boom") == "update":
            raise RuntimeError("no state for this one")
        return args.get("only"), args.get("boom"), added.output_token_ids

    def apply(self, logits, rows, offsets=None, drafts=None):
        for index, (token, boom, output) in self._states.of(rows):
            if boom == "apply" and len(output) == 3:
                raise RuntimeError("three tokens are enough")
            kept = logits[index, token].clone()
            logits[index] = -torch.inf
            logits[index, token] = kept
        return logits


class Writes(AdapterLogitsProcessor):
    """An answer of the tokens that `write` lists, and then an end token."""

    def new_req_logits_processor(self, params):
        script = (params.extra_args or {}).get("write")
        if script is None:
            return None

        def write(prompt_ids, output_ids, logits):
            ids = [*script, *self.context.eos_token_ids]
            chosen = torch.full_like(logits, -torch.inf)
            chosen[ids[min(len(output_ids), len(ids) - 1)]] = 0.0
            return chosen

        return write


class Counts(AdapterLogitsProcessor):
    """The callable of a request: its n-th output token is `from` + n."""

    def new_req_logits_processor(self, params):
        first = (params.extra_args or {}).get("from")
        if first is None:
            return None

        def count(prompt_ids, output_ids, logits):
            if first + len(output_ids) >= len(logits):
                raise OverflowError(f"no token {first + len(output_ids)} after {len(prompt_ids)}")
            chosen = torch.full_like(logits, -torch.inf)
            chosen[first + len(output_ids)] = 0.0
            return chosen

        return count
'''


def install(folder: Path, package: str, **points: str) -> None:
    """What pip leaves of a package with these entry points."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {place}" for name, place in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINTS}]", *lines, ""]))


@contextmanager
def packages_in(folder: Path) -> Iterator[None]:
    """The folder is on the path, here and in processes that are started; what is imported from it
    is forgotten afterwards."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        yield
    for name in set(sys.modules) - before:
        if name.startswith("strata_"):
            del sys.modules[name]
