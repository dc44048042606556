# SPDX-License-Identifier: Apache-2.0
"""What waits in a mailbox becomes one output that says everything."""

from __future__ import annotations

import asyncio

from stratakv.engine.client.message_client import Mailbox
from stratakv.engine.request.core_messages import TokenOutput
from stratakv.engine.request.logprobs import PositionLogprobs


def at(token: int) -> PositionLogprobs:
    return PositionLogprobs([token], [-1.0], 1)


def test_outputs_that_wait_are_joined() -> None:
    async def read() -> TokenOutput:
        mailbox = Mailbox()
        mailbox.put(
            TokenOutput("r", [1], num_cached_tokens=5, logprobs=[at(1)], prompt_logprobs=[None])
        )
        mailbox.put(TokenOutput("r", [2, 3], logprobs=[at(2), at(3)]))
        mailbox.put(TokenOutput("r", [], "length"))
        return await asyncio.wait_for(mailbox.get(), 5.0)

    output = asyncio.run(read())
    assert output.new_token_ids == [1, 2, 3]
    assert output.logprobs == [at(1), at(2), at(3)]
    assert (output.num_cached_tokens, output.prompt_logprobs) == (5, [None])
    assert output.finish_reason == "length"


def test_nobody_asked_for_log_probabilities() -> None:
    async def read() -> TokenOutput:
        mailbox = Mailbox()
        mailbox.put(TokenOutput("r", [1]))
        mailbox.put(TokenOutput("r", [2]))
        return await asyncio.wait_for(mailbox.get(), 5.0)

    assert asyncio.run(read()).logprobs is None
