# SPDX-License-Identifier: Apache-2.0
"""Token outputs become text: stop strings, end tokens, the minimum, and what the core is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from stratakv.engine.client.base import EngineClient
from stratakv.engine.client.message_client import Mailbox
from stratakv.engine.request.core_messages import AddRequest, ExtendPrompt, TokenOutput
from stratakv.engine.request.logprobs import PositionLogprobs
from stratakv.engine.request.request import pack_token_ids, unpack_token_ids
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.text.output_processor import OutputProcessor, TextOutput, generate_text
from stratakv.engine.text.tokenizer import Tokenizer

from .small_tokenizers import TOKENIZERS, WORDS


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token for each byte, and `<end>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    fast = FastTokenizer(models.BPE(vocabulary, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<end>"])
    return Tokenizer(fast)


def process(
    tokenizer: Tokenizer, params: SamplingParams, outputs: list[TokenOutput]
) -> list[TextOutput]:
    """Up to the first with a finish reason."""
    processor = OutputProcessor(tokenizer, params)
    results = []
    for output in outputs:
        results.append(processor.process(output))
        if results[-1].finish_reason is not None:
            break
    return results


def outputs_of(tokenizer: Tokenizer, text: str, count: int, **last: Any) -> list[TokenOutput]:
    """The text's tokens, `count` in each output; `last` completes the last one."""
    ids = tokenizer.encode(text)
    made = [TokenOutput("r", ids[i : i + count]) for i in range(0, len(ids), count)]
    for name, value in last.items():
        setattr(made[-1], name, value)
    return made


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_tokens_and_text_end_at_a_stop_string(tokenizer: Tokenizer, count: int) -> None:
    outputs = outputs_of(tokenizer, "one, two. Three.", count)
    results = process(tokenizer, SamplingParams(stop=(". ",), max_tokens=99), outputs)
    assert "".join([r.text for r in results]) == "one, two"
    assert [token for r in results for token in r.token_ids] == tokenizer.encode("one, two. ")
    assert (results[-1].finish_reason, results[-1].stop_reason) == ("stop", ". ")
    assert all(r.finish_reason is None for r in results[:-1])


def test_a_stop_string_may_stay_in_the_text(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop=("wo",), include_stop_str_in_output=True)
    results = process(tokenizer, params, outputs_of(tokenizer, "one two three", 1))
    assert "".join([r.text for r in results]) == "one two"


def test_before_the_minimum_nothing_stops(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop=("a",), min_tokens=4, max_tokens=9)
    results = process(tokenizer, params, outputs_of(tokenizer, "aaabcad", 2))
    assert "".join([r.text for r in results]) == "aaabc"
    assert [token for r in results for token in r.token_ids] == tokenizer.encode("aaabca")


@pytest.mark.parametrize("minimum", range(7))
def test_a_stop_string_may_begin_with_the_minimum(tokenizer: Tokenizer, minimum: int) -> None:
    """The text of the token that reaches it counts, what is before does not."""
    params = SamplingParams(stop=("abc",), min_tokens=minimum, max_tokens=9)
    results = process(tokenizer, params, outputs_of(tokenizer, "xabcabcx", 1))
    text = "".join([r.text for r in results])
    if minimum <= 2:
        assert text == "x"
    elif minimum <= 5:
        assert text == "xabc"
    else:
        assert text == "xabcabcx"
        assert results[-1].finish_reason is None


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("count", [1, 3, 100])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_of_several_bytes(name: str, count: int, include: bool) -> None:
    """Also where they begin or end in the middle of a token, or of a letter."""
    tokenizer = TOKENIZERS[name]()
    text = " ".join(WORDS)
    for stop in ("漢字の", "🙃", "ï", "\u200d👧", "🇯", "\u0323", "é, 1", "สว", "어", "नम"):
        params = SamplingParams(stop=(stop,), include_stop_str_in_output=include, max_tokens=999)
        outputs = outputs_of(tokenizer, text, count, finish_reason="length")
        results = process(tokenizer, params, outputs)
        before = text[: text.index(stop)]
        assert "".join([r.text for r in results]) == before + (stop if include else "")
        assert (results[-1].finish_reason, results[-1].stop_reason) == ("stop", stop)
        ids = [token for r in results for token in r.token_ids]
        assert ids == tokenizer.encode(text)[: len(ids)]
        assert stop in tokenizer.decode(ids)
        assert stop not in tokenizer.decode(ids[:-1])


@pytest.mark.parametrize("count", [1, 4, 100])
def test_log_probabilities_end_with_their_tokens(tokenizer: Tokenizer, count: int) -> None:
    outputs = outputs_of(tokenizer, "one, two. Three.", count)
    for output in outputs:
        output.logprobs = [PositionLogprobs([token], [-0.5], 1) for token in output.new_token_ids]
    outputs[0].prompt_logprobs = [None]
    results = process(tokenizer, SamplingParams(stop=(". ",), max_tokens=99), outputs)
    for result in results:
        assert result.logprobs is not None
        assert [entry.token_ids[0] for entry in result.logprobs] == result.token_ids
    assert len([token for r in results for token in r.token_ids]) == len("one, two. ")
    assert [r.prompt_logprobs for r in results] == [[None]] + [None] * (len(results) - 1)


def test_who_did_not_ask_gets_no_log_probabilities(tokenizer: Tokenizer) -> None:
    [result] = process(tokenizer, SamplingParams(), outputs_of(tokenizer, "one", 100))
    assert (result.logprobs, result.prompt_logprobs) == (None, None)


def test_an_end_token_is_no_text(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_id("<end>")
    assert end is not None
    for skip in (True, False):
        params = SamplingParams(skip_special_tokens=skip)
        last = TokenOutput("r", [end], finish_reason="stop")
        results = process(tokenizer, params, [TokenOutput("r", tokenizer.encode("ab")), last])
        assert "".join([r.text for r in results]) == "ab"
        assert results[-1].token_ids == [end]


def test_the_last_token_of_an_answer_that_a_grammar_has_ended_is_text(tokenizer: Tokenizer) -> None:
    """The end has no token of its own, and may be read together with the tokens before it."""

    async def read(params: SamplingParams) -> str:
        mailbox = Mailbox()
        mailbox.put(TokenOutput("r", tokenizer.encode("ab")))
        mailbox.put(TokenOutput("r", [], finish_reason="stop", ends_without_token=True))
        [result] = process(tokenizer, params, [await mailbox.get()])
        return result.text

    assert asyncio.run(read(SamplingParams())) == "ab"
    assert asyncio.run(read(SamplingParams(stop=("x",)))) == "ab"


def test_what_was_held_back_comes_with_the_end(tokenizer: Tokenizer) -> None:
    outputs = outputs_of(tokenizer, "a b #", 1, finish_reason="length", timings={"queue": 1.0})
    results = process(tokenizer, SamplingParams(stop=("###",)), outputs)
    assert "".join([r.text for r in results]) == "a b #"
    assert results[-1].finish_reason == "length"
    assert results[-1].timings == {"queue": 1.0}
    outputs = [*outputs_of(tokenizer, "a b #", 1), TokenOutput("r", [], finish_reason="abort")]
    results = process(tokenizer, SamplingParams(stop=("###",)), outputs)
    assert "".join([r.text for r in results]) == "a b #"


def test_without_a_tokenizer_ids_pass_and_stop_strings_do_not() -> None:
    [result] = [OutputProcessor(None, SamplingParams()).process(TokenOutput("r", [5, 6]))]
    assert (result.text, result.token_ids) == ("", [5, 6])
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        OutputProcessor(None, SamplingParams(stop=("x",)))


class Recorder(EngineClient):
    """Plays outputs and notes whether its iterator was closed before they ended."""

    def __init__(self, outputs: list[TokenOutput]) -> None:
        self.outputs = outputs
        self.closed_early = False

    is_alive = True

    async def generate(self, request: AddRequest) -> AsyncIterator[TokenOutput]:
        self.closed_early = True
        for output in self.outputs:
            yield output
        self.closed_early = False

    async def open_prompt(self, request: AddRequest) -> None: ...
    async def extend_prompt(self, part: ExtendPrompt) -> None: ...
    async def drop_prompt(self, request_id: str) -> None: ...
    async def abort(self, request_ids: list[str]) -> None: ...
    async def call(self, name: str, argument: str = "", timeout_seconds: float = 10.0) -> Any: ...
    async def close(self, timeout_seconds: float = 30.0) -> None: ...


def test_the_core_hears_of_a_stop_string(tokenizer: Tokenizer) -> None:
    client = Recorder(outputs_of(tokenizer, "yes. no.", 1))

    async def run() -> str:
        request = AddRequest("r", b"", SamplingParams(stop=(".",)))
        return "".join([part.text async for part in generate_text(client, request, tokenizer)])

    assert asyncio.run(run()) == "yes"
    assert client.closed_early


def test_token_ids_travel_as_int32() -> None:
    assert pack_token_ids([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"
    assert unpack_token_ids(pack_token_ids([0, 2**31 - 1])) == [0, 2**31 - 1]
    for bad in ([2**31], [1.5], ["1"]):
        with pytest.raises(ValueError, match="32-bit integer"):
            pack_token_ids(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="4 bytes each"):
        unpack_token_ids(b"abc")
