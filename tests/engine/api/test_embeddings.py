# SPDX-License-Identifier: Apache-2.0
"""/v1/embeddings over HTTP and with OpenAI's client, and `LLM.embed`, against transformers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from stratakv.engine import LLM
from stratakv.engine.request.pooling import Dimensions, finish_vector
from stratakv.engine.text.tokenizer import Tokenizer

from .conftest import MAX_MODEL_LEN, VOCAB_SIZE, LiveServer

PATH = "/v1/embeddings"
TEXTS = ["hello world", "the quick brown fox"]
NEAR = {"rtol": 1e-4, "atol": 1e-5}
Vectors = NDArray[np.float64]


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[LiveServer]:
    live = LiveServer(model_path)
    yield live
    live.stop()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as made:
        yield made


@pytest.fixture(scope="module")
def states(model_path: Path) -> Any:
    """Hidden states `[tokens, hidden]` of token ids."""
    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float64).model

    @torch.inference_mode()
    def of(ids: Sequence[int]) -> Vectors:
        found: Vectors = model(torch.tensor([list(ids)])).last_hidden_state[0].numpy()
        return found

    return of


def unit(vector: Vectors) -> Vectors:
    return vector / np.linalg.norm(vector)


def post(client: httpx.Client, **body: Any) -> list[Vectors]:
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [each["index"] for each in data] == list(range(len(data)))
    return [np.array(each["embedding"]) for each in data]


def test_texts_and_token_ids(client: httpx.Client, model_path: Path, states: Any) -> None:
    """One of each, and lists of them; vectors have the length 1 unless somebody wants it not."""
    ids = [Tokenizer.load(model_path).encode(text) for text in TEXTS]
    expected = [states(each)[-1] for each in ids]
    given: list[Any] = [TEXTS[0], TEXTS, ids[0], ids]
    for value in given:
        found = post(client, input=value)
        for vector, wanted in zip(found, expected, strict=False):
            np.testing.assert_allclose(vector, unit(wanted), **NEAR)
        assert len(found) == (2 if value in (TEXTS, ids) else 1)
    [raw] = post(client, input=ids[1], normalize=False)
    np.testing.assert_allclose(raw, expected[1], **NEAR)
    [cut] = post(client, input=ids[1], truncate_prompt_tokens=2)
    np.testing.assert_allclose(cut, unit(states(ids[1][-2:])[-1]), **NEAR)


def test_with_openais_client(server: LiveServer, client: httpx.Client) -> None:
    """It asks for base64 without being told to."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as official:
        answer = official.embeddings.create(model="tiny", input=TEXTS)
    expected = post(client, input=TEXTS)
    for each, wanted in zip(answer.data, expected, strict=True):
        np.testing.assert_allclose(each.embedding, wanted, **NEAR)
    assert answer.object == "list" and answer.model == "tiny"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 2
    body = {"input": TEXTS[0], "encoding_format": "base64"}
    [one] = client.post(PATH, json=body).json()["data"]
    numbers = np.frombuffer(base64.b64decode(one["embedding"]), "<f4")
    np.testing.assert_array_equal(numbers, expected[0].astype("<f4"))


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": []}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": [1, "a"]}, 400, "input"),
        ({"input": ["a"] * 129}, 400, "input"),
        ({"input": [VOCAB_SIZE]}, 400, "input"),
        ({"input": [[1], [-1]]}, 400, "input[1]"),
        ({"input": [1] * MAX_MODEL_LEN}, 400, "input"),
        ({}, 400, "input"),
        ({"input": "a", "model": "other"}, 404, "model"),
        ({"input": "a", "dimensions": 8}, 400, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
        ({"input": "a", "cache_salt": "x" * 257}, 400, "cache_salt"),
        ({"input": "a", "temperature": 1}, 400, "temperature"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bodies_that_cannot_be(
    client: httpx.Client, body: dict[str, Any], status: int, param: str
) -> None:
    response = client.post(PATH, json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


def test_dimensions_where_the_model_allows_fewer(model_path: Path, tmp_path: Path) -> None:
    assert Dimensions.load(model_path) == Dimensions()
    config = json.loads((model_path / "config.json").read_text())
    for more, good, bad in (
        ({"is_matryoshka": True}, (None, 1, 7, 32), (0, 33, "8", True)),
        ({"matryoshka_dimensions": [8, 16, "x"]}, (None, 8, 16, 32), (9, 0)),
        ({"is_matryoshka": False}, (None, 32), (8,)),
        ({}, (32,), (8,)),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | more))
        dimensions = Dimensions.load(tmp_path)
        for count in good:
            dimensions.check_asked_count(count, 32)  # type: ignore[arg-type]
        for count in bad:
            with pytest.raises(ValueError, match=r"^dimensions must be"):
                dimensions.check_asked_count(count, 32)  # type: ignore[arg-type]
    data = np.array([3.0, 4.0, 12.0], "<f8").tobytes()
    assert finish_vector(data, normalize=True, dimensions=2).tolist() == [0.6, 0.8]
    assert finish_vector(data, normalize=False).tolist() == [3.0, 4.0, 12.0]


def test_vectors_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="no embedding"):
        finish_vector(None, normalize=True)
    with pytest.raises(ValueError, match="not finite"):
        finish_vector(np.array([np.nan], "<f8").tobytes(), normalize=True)
    assert finish_vector(bytes(16), normalize=True).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embed_of_the_python_api(model_path: Path, states: Any, pooling: str) -> None:
    with LLM(model_path, dtype="float64", pooling=pooling, num_blocks=300, num_threads=1) as llm:
        answers = llm.embed([TEXTS[0], [5, 6, 7], TEXTS[1]])
        raw = llm.embed([[5, 6, 7]], normalize=False)
        for answer in answers:
            rows = states(answer.prompt_token_ids)
            wanted = rows[-1] if pooling == "last" else rows.mean(0)
            np.testing.assert_allclose(answer.outputs.embedding, unit(wanted), **NEAR)
            assert answer.error is None
        assert [answer.prompt for answer in answers] == [TEXTS[0], None, TEXTS[1]]
        assert len({answer.request_id for answer in answers}) == 3
        length = np.linalg.norm(raw[0].outputs.embedding)
        np.testing.assert_allclose(
            np.array(raw[0].outputs.embedding) / length, answers[1].outputs.embedding
        )
        assert abs(length - 1) > 1e-3
        with pytest.raises(ValueError, match="prompt 1: it is empty"):
            llm.embed(["a", ""])
        with pytest.raises(ValueError, match="dimensions must be"):
            llm.embed("a", dimensions=3)
        with pytest.raises(ValueError, match="normalize takes True or False, not 1"):
            llm.embed("a", normalize=1)  # type: ignore[arg-type]
