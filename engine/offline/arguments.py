# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of `LLM`'s methods, and converts each argument to one value per prompt.

All functions of this module raise ValueError with the expected and the given value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt

from ...tiers.settings.format import format_value
from ..request.core_messages import Ready, RequestExtras
from ..request.prompt_embeds import read_embeds, write_embeds
from ..request.sampling_params import SamplingParams, check_params_for_embeds

Prompt = str | Sequence[int] | npt.NDArray[Any]
Conversation = Sequence[Mapping[str, Any]]
# Iterable types that are refused as lists, because their items are no prompts or have no order.
NO_LISTS = (bytes, bytearray, memoryview, dict, set, frozenset)


def prompts_in(prompts: Any) -> list[Any]:
    """Return the prompts of a call as a list. A single text becomes a list of one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, NO_LISTS) or not hasattr(prompts, "__iter__"):
        raise ValueError(f"prompts are a text or a list of prompts, not {type_name(prompts)}")
    return list(prompts)


def check_salt(salt: object) -> None:
    """Raise ValueError for a cache salt that is not a text of valid Unicode."""
    try:
        is_text = isinstance(salt, str) and salt.encode() is not None
    except UnicodeEncodeError:
        is_text = False
    if not is_text:
        raise ValueError(f"cache_salt is a text of valid Unicode, not {salt!r}")


def type_name(value: object) -> str:
    return type(value).__name__


def params_for(
    count: int, given: SamplingParams | Sequence[SamplingParams] | None, what: str
) -> Sequence[SamplingParams]:
    """Return sampling parameters for each of `count` prompts, by default SamplingParams()."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if not isinstance(given, list | tuple):
        raise ValueError(
            f"sampling parameters are SamplingParams or a list, not {type_name(given)}"
        )
    if len(given) != count:
        raise ValueError(
            f"{count} {what} need one or {count} sampling parameters, not {len(given)}"
        )
    return given


def priorities_for(count: int, given: Sequence[int] | None, what: str) -> Sequence[int]:
    """Return a priority for each of `count` prompts, by default 0."""
    if given is None:
        return [0] * count
    if not isinstance(given, list | tuple):
        raise ValueError(f"priority is a list of whole numbers, not {type_name(given)}")
    if len(given) != count:
        raise ValueError(f"priority has {len(given)} numbers for {count} {what}")
    for each in given:
        if isinstance(each, bool) or not isinstance(each, int):
            raise ValueError(f"priority is a list of whole numbers, and holds {type_name(each)}")
    return given


def conversations_in(messages: Any) -> list[Any]:
    """Return the conversations in `messages`, one conversation or a list of them, as a list."""
    if isinstance(messages, list | tuple):
        if all(isinstance(each, list | tuple) for each in messages):
            return list(messages)
        if all(isinstance(each, Mapping) for each in messages):
            return [messages]
    raise ValueError(
        "messages are a list of dicts, each with `role` and `content`, or a list of such lists, "
        f"not {format_value(messages)}"
    )


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Add `what` and a colon in front of the text of a ValueError that the block raises."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def check_switch(name: str, value: object) -> None:
    """Raise ValueError for any value except True and False; 0 and 1 are refused too."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} takes True or False, not {format_value(value)}")


def embeds_extras(
    prompt: npt.NDArray[Any], params: SamplingParams, ready: Ready, longest: int
) -> RequestExtras:
    """Return a request's extras with a prompt of embeddings, after the engine core's own checks of
    the prompt. Raises ValueError."""
    check_params_for_embeds(params)
    data = write_embeds(prompt)
    read_embeds(data, ready.hidden_size, longest, ready.largest_embedding)
    return RequestExtras(prompt_embeds=data)
