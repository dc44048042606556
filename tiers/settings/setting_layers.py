# SPDX-License-Identifier: Apache-2.0
"""Values with their origins, and how layers of them become one.

    flags  >  environment  >  file  >  what aliases imply  >  defaults

The highest layer that gives an option decides it. Where two options exclude each other, the one
of the higher layer also hides the other of a lower layer; within one layer that is a contradiction,
which whoever uses the values refuses. The caller says which options there are and what they hide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .option import flag_of

FLAG = "flag"
VARIABLE = "variable"
FILE = "file"

MODEL = "model"  # the only option that is an argument and no flag
_NAMES_IN_TEXT = re.compile(r"--(?:no-)?([a-z][a-z0-9-]*)|\b(MODEL)\b")


@dataclass(frozen=True, slots=True)
class Given:
    """One value, read already, and where it came from."""

    value: Any
    kind: str  # FLAG | VARIABLE | FILE
    origin: str  # as a person knows it: `--port`, `STRATAKV_PORT`, `port of x.yaml`


Layer = Mapping[str, Given]


Hides = Callable[[str, Any], Iterable[str]]


def merge(layers: Sequence[Layer], hides: Hides = lambda _name, _value: ()) -> dict[str, Given]:
    """One value for each option that any layer gives; the first layer is the highest. `hides` names
    the options that mean nothing once an option has a value."""
    merged: dict[str, Given] = {}
    for layer in layers:
        hidden = {other for name, given in merged.items() for other in hides(name, given.value)}
        for name, given in layer.items():
            if name not in hidden:
                merged.setdefault(name, given)
    return merged


def with_origins(message: str, given: Layer, known: Container[str]) -> str:
    """A refusal with the origins of the `known` options it names, unless all of them were flags."""
    named = {
        name: given[name]
        for flag, model in _NAMES_IN_TEXT.findall(message)
        if (name := MODEL if model else flag.replace("-", "_")) in given and name in known
    }
    origins = {
        MODEL.upper() if name == MODEL else flag_of(name): each.origin
        for name, each in named.items()
    }
    if all(flag == origin for flag, origin in origins.items()):
        return message
    words = [
        f"{flag} comes from {'the command line' if flag == origin else origin}"
        for flag, origin in origins.items()
    ]
    return f"{message} ({', '.join(words)})"
