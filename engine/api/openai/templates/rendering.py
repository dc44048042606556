# SPDX-License-Identifier: Apache-2.0
"""`Rendering`: renders a conversation, and `TemplateProbe`'s tests, with a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...api_settings import ApiSettings
from ...chat_template import ChatTemplate
from .template_probe import PICTURE_MARK, CallForm, Seen, in_parts


@dataclass(frozen=True, slots=True)
class Rendering:
    """A chat template with the limits, variables and tools of one request. If the template ignores
    plain texts, it gets messages' contents as lists of parts. The methods raise TemplateRefused."""

    template: ChatTemplate
    settings: ApiSettings
    opens_turn: bool
    variables: Mapping[str, object]
    tools: Sequence[Mapping[str, object]] | None

    async def render(self, seen: Sequence[Seen]) -> tuple[str, list[int]]:
        """Return the prompt, and the indices of the messages that the template left out."""
        text = await self.make_prompt(seen)
        shape = (self.opens_turn, bool(self.tools), msgspec.json.encode(self.variables))
        return text, await self.template.probe.left_out(text, seen, shape, self.make_prompt)

    async def call_form(self) -> CallForm:
        """Return the form of tool calls that the template shows in this conversation."""
        return await self.template.probe.call_form(self._plain, tools=bool(self.tools))

    async def takes_both(self, one: str, other: str) -> bool:
        """Return whether the template shows a message of role `other` after one of role `one`."""
        return await self.template.probe.takes_both(self._plain, one, other)

    async def make_prompt(self, seen: Sequence[Seen]) -> str:
        """Return the prompt without a search for messages that the template left out."""
        given = await self._given(seen)
        return await self._render(given, self.tools, self.opens_turn, self.variables)

    async def _plain(self, seen: Sequence[Seen], tools: Sequence[Any] | None = None) -> str:
        """Return the prompt of a test conversation, without this request's variables and tools."""
        return await self._render(await self._given(seen), tools, False, {})

    async def _given(self, seen: Sequence[Seen]) -> Sequence[Seen]:
        """Return the messages, with contents in a form that the template shows: text or parts."""
        if await self.template.probe.takes_parts(self._unchanged):
            return [in_parts(message) for message in seen]
        return [in_parts(each) if PICTURE_MARK in str(each.get("content")) else each
                for each in seen]  # fmt: skip

    async def _unchanged(self, seen: Sequence[Seen]) -> str:
        return await self._render(seen, None, False, {})

    async def _render(
        self,
        seen: Sequence[Seen],
        tools: Sequence[Mapping[str, object]] | None,
        opens_turn: bool,
        variables: Mapping[str, object],
    ) -> str:
        return await self.template.render(
            seen,
            add_generation_prompt=opens_turn,
            variables=variables,
            max_characters=self.settings.max_rendered_characters,
            timeout_seconds=self.settings.template_timeout_seconds,
            tools=tools,
        )
