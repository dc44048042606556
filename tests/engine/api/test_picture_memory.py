# SPDX-License-Identifier: Apache-2.0
"""The memory of processed pictures in the HTTP server: reserved before decoding, then free."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from PIL import Image

from stratakv.engine.api.api_errors import ApiError
from stratakv.engine.api.api_settings import ApiSettings
from stratakv.engine.api.openai.request.protocol import ChatMessage
from stratakv.engine.api.picture_reader import PictureReader
from stratakv.engine.pictures.picture_budget import PictureBudget
from stratakv.engine.pictures.picture_errors import PictureBudgetFull, PictureError
from stratakv.engine.pictures.processors.picture_processor import ProcessedPicture

from ..picture_model import draw_picture, make_picture_model, url_of
from .conftest import MODEL_NAME, LiveServer

SIDE = 64  # the processed picture has the same size
NUM_BYTES = 2 * SIDE * SIDE * 3  # the pixels and the message to the engine
PICTURE = draw_picture(SIDE, SIDE, 1)
WAIT_SECONDS = 60.0
LONG = {"type": "text", "text": "x" * 3000}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_picture_model(tmp_path_factory.mktemp("memory"), "qwen3_vl")


@pytest.fixture
def reader(path: Path) -> Iterator[PictureReader]:
    made = PictureReader.load(path, ApiSettings())
    assert made is not None
    made.budget.max_bytes = 3 * NUM_BYTES
    yield made
    made.pool.close_pool()


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[LiveServer]:
    live = LiveServer(path, ApiSettings())
    yield live
    live.stop()


def damaged(picture: Image.Image) -> str:
    """A URL of a file whose header is valid and whose pixels are not."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    data = bytearray(file.getvalue())
    at = data.index(b"IDAT") + 4
    data[at : at + 8] = bytes(8)
    return "data:image/png;base64," + base64.b64encode(data).decode()


def content_of(*urls: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def read(reader: PictureReader, *urls: str) -> Any:
    chat = [{"role": "user", "content": content_of(*urls)}]
    messages = msgspec.convert(chat, list[ChatMessage])
    return asyncio.run(reader.read_pictures(messages, 1000))


def wait_for(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_a_budget_counts_all_reservations_that_are_held() -> None:
    budget = PictureBudget(100)
    first, second = budget.open_reservation(), budget.open_reservation()
    first.reserve_pixels(60)
    first.reserve_pixels(10)  # no other request holds anything
    with pytest.raises(
        PictureBudgetFull, match=r"holds 140 bytes.*20 bytes more.*send the request"
    ):
        second.reserve_pixels(10)
    assert (budget.reserved_bytes, second.num_bytes) == (140, 0)
    del first
    second.reserve_pixels(40)
    third = budget.open_reservation()
    third.reserve_pixels(10)
    with pytest.raises(PictureBudgetFull):
        second.reserve_pixels(1)
    assert budget.reserved_bytes == 100


def test_a_picture_beyond_the_budget_gets_503_and_is_not_decoded(reader: PictureReader) -> None:
    other = reader.budget.open_reservation()
    other.reserve_pixels(NUM_BYTES)  # 2 of 3 parts
    with pytest.raises(ApiError) as told:
        read(reader, url_of(PICTURE), damaged(PICTURE))
    assert (told.value.status, told.value.code) == (503, "overloaded")
    assert "messages[0].content[1]" in told.value.message
    assert "send the request later" in told.value.message
    assert reader.budget.reserved_bytes == other.num_bytes
    pictures, reservation = read(reader, url_of(PICTURE))
    assert len(pictures) == 1 and reservation.num_bytes == NUM_BYTES
    assert reader.budget.reserved_bytes == reader.budget.max_bytes
    del reservation
    assert reader.budget.reserved_bytes == other.num_bytes


def test_a_request_alone_may_be_larger_than_the_budget(reader: PictureReader) -> None:
    pictures, reservation = read(reader, *[url_of(PICTURE)] * 4)
    assert len(pictures) == 4 and reservation.num_bytes == 4 * NUM_BYTES


def test_pictures_beyond_the_context_are_not_decoded(reader: PictureReader) -> None:
    messages = msgspec.convert(
        [{"role": "user", "content": content_of(url_of(PICTURE), damaged(PICTURE))}],
        list[ChatMessage],
    )
    with pytest.raises(ApiError) as told:
        asyncio.run(reader.read_pictures(messages, 20))
    assert told.value.code == "context_length_exceeded"


class SlowProcessor:
    """Processes a picture only when another one is processed too."""

    def __init__(self, processor: Any) -> None:
        self._processor, self._pair = processor, threading.Barrier(2)
        self.measure_picture = processor.measure_picture

    def process_picture(self, image: Image.Image) -> ProcessedPicture:
        self._pair.wait(WAIT_SECONDS)
        made: ProcessedPicture = self._processor.process_picture(image)
        return made


class ScriptedSources:
    """The file of each URL: of the same number, when the picture with the number `after` fails."""

    def __init__(self, files: dict[str, bytes], after: dict[str, str]) -> None:
        self._files, self._after = files, after
        self._failed = {name: asyncio.Event() for name in files}
        self.running = self.most = 0

    async def read_picture(self, url: str) -> bytes:
        self.running += 1
        self.most = max(self.most, self.running)
        if url in self._after:
            await self._failed[self._after[url]].wait()
        await asyncio.sleep(0)
        self.running -= 1
        if not self._files[url]:
            self._failed[url].set()
            raise PictureError("no file")
        return self._files[url]


def png_of(picture: Image.Image) -> bytes:
    return base64.b64decode(url_of(picture).partition(",")[2])


def test_two_pictures_of_a_request_are_read_at_the_same_time(reader: PictureReader) -> None:
    drawn = [draw_picture(SIDE, SIDE, number) for number in range(4)]
    slow = replace(reader, processor=SlowProcessor(reader.processor))
    pictures, reservation = read(slow, *map(url_of, drawn))
    reservation.free_bytes()
    wanted = [reader.processor.process_picture(each).items[0].digest for each in drawn]
    assert [each.items[0].digest for each in pictures] == wanted
    files = {str(number): png_of(each) for number, each in enumerate(drawn)}
    sources: Any = ScriptedSources(files, {})
    read(replace(reader, sources=sources), *files)
    assert sources.most == 2


def test_the_first_error_in_order_is_told(reader: PictureReader) -> None:
    """The second picture fails first; then the first one does, in its file or in its pixels."""
    bad = base64.b64decode(damaged(PICTURE).partition(",")[2])
    for first, words in ((b"", "no file"), (bad, "damaged"), (png_of(PICTURE), "no file")):
        sources: Any = ScriptedSources({"0": first, "1": b"", "2": b""}, {"0": "1"})
        with pytest.raises(ApiError) as told:
            read(replace(reader, sources=sources), "0", "1", "2")
        number = 1 if first == png_of(PICTURE) else 0
        assert told.value.param == f"messages[0].content[{number}]"
        assert words in told.value.message
    assert reader.budget.reserved_bytes == 0


@pytest.mark.parametrize("n", [1, 2])
def test_memory_is_free_when_the_engine_has_the_pictures(server: LiveServer, n: int) -> None:
    budget = server.app.state.pictures.budget
    content = [*content_of(url_of(PICTURE)), {"type": "text", "text": f"say {n}"}]
    body = {
        "model": MODEL_NAME, "messages": [{"role": "user", "content": content}],
        "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": n,
    }  # fmt: skip
    server.run(server.client.call("pause", "all"))
    with httpx.Client(base_url=server.url, timeout=60) as http, ThreadPoolExecutor(1) as threads:

        def begin() -> tuple[int, str]:
            chosen = set()
            with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        chosen.add(msgspec.json.decode(line[6:])["choices"][0]["index"])
                    if len(chosen) == n:
                        return budget.reserved_bytes, line
            return -1, "ended"

        begun = threads.submit(begin)
        wait_for(lambda: budget.reserved_bytes == NUM_BYTES, "nothing is reserved")
        server.run(server.client.call("resume"))
        assert begun.result(WAIT_SECONDS)[0] == 0


def test_failed_requests_hold_no_memory(server: LiveServer) -> None:
    budget = server.app.state.pictures.budget
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for fields in ({"content": content_of(url_of(PICTURE), damaged(PICTURE))},
                       {"content": content_of(url_of(PICTURE)), "n": 10_000},
                       {"content": [*content_of(url_of(PICTURE)), LONG]}):  # fmt: skip
            chat = [{"role": "user", "content": fields.pop("content")}]
            body = {"model": MODEL_NAME, "messages": chat, "max_tokens": 1, **fields}
            assert http.post("/v1/chat/completions", json=body).status_code == 400
    wait_for(lambda: budget.reserved_bytes == 0, "a failed request holds memory")
