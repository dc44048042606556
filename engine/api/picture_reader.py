# SPDX-License-Identifier: Apache-2.0
"""`PictureReader`: reads the pictures of a conversation for one model.

URL ─► bytes of a file ─► size in the header: tokens and memory ─► decoded within limits ─► items of
pixels, the input of the model"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..models.spec.spec_parser import load_model_spec
from ..pictures.picture_budget import PictureBudget, PictureReservation
from ..pictures.picture_decoding import decode_file, read_picture_file
from ..pictures.picture_errors import PictureOverload
from ..pictures.picture_file import PictureFile
from ..pictures.picture_pool import PicturePool
from ..pictures.picture_sources import PictureSources
from ..pictures.processors.known_processors import load_processor
from ..pictures.processors.picture_processor import (
    PictureProcessor,
    ProcessedPicture,
    expand_placeholders,
    place_items,
)
from ..request.pictures import Picture
from .api_errors import ENGINE, ApiError
from .api_settings import ApiSettings
from .openai.message_parts import picture_urls
from .openai.request.protocol import ChatMessage

# Pictures of one request that are read at the same time, as many as the pool has threads.
MAX_AT_ONCE = 2


class _Limits(NamedTuple):
    """The limits of a picture, which depend on the other pictures of its request."""

    before: asyncio.Future[int]  # the tokens of the pictures before it, once these are known
    behind: asyncio.Future[int]  # the same with its own tokens
    max_tokens: int
    reservation: PictureReservation


@dataclass(frozen=True, slots=True)
class PictureReader:
    """Reads pictures for one model. `token_id`: the token of the model's picture placeholder."""

    processor: PictureProcessor
    token_id: int
    sources: PictureSources
    pool: PicturePool
    budget: PictureBudget
    most: int  # limit of the pictures in one request

    @classmethod
    def load(cls, path: Path, settings: ApiSettings) -> PictureReader | None:
        """Return the reader for the model at `path`; None for a model that reads only text. Raises
        ConfigError for unsupported settings of the model."""
        spec = load_model_spec(path).vision
        if spec is None:
            return None
        return cls(
            load_processor(path, spec),
            spec.token_id,
            PictureSources(settings.media_domains),
            PicturePool(),
            PictureBudget(),
            settings.max_pictures_per_request,
        )

    async def read_pictures(
        self, messages: Sequence[ChatMessage], max_tokens: int
    ) -> tuple[list[ProcessedPicture], PictureReservation]:
        """Return all pictures of a conversation, in order, and the reservation of their memory,
        which the caller must hold as long as the pictures. Raises ApiError, which names the part of
        the message, for an invalid picture, for a picture without memory, and for the first picture
        with which all pictures have more than `max_tokens` tokens: it is not decoded."""
        found = picture_urls(messages)
        if len(found) > self.most:
            message = (
                f"the conversation has {len(found)} pictures and at most {self.most} are read; "
                "send fewer"
            )
            raise ApiError(message, param="messages", code="too_many_pictures")
        reservation = self.budget.open_reservation()
        try:
            return await self._read_found(found, max_tokens, reservation), reservation
        except BaseException:
            reservation.free_bytes()
            raise

    async def _read_found(
        self, found: Sequence[tuple[str, str]], max_tokens: int, reservation: PictureReservation
    ) -> list[ProcessedPicture]:
        """Read MAX_AT_ONCE pictures at the same time, and return all in order. Raises the error of
        the first picture in order that has one."""
        turns, loop = asyncio.Semaphore(MAX_AT_ONCE), asyncio.get_running_loop()
        before: asyncio.Future[int] = loop.create_future()  # the tokens of all earlier pictures
        before.set_result(0)
        tasks = []
        for place, url in found:
            behind: asyncio.Future[int] = loop.create_future()
            limits = _Limits(before, behind, max_tokens, reservation)
            tasks.append(loop.create_task(self._read_picture(place, url, turns, limits)))
            before = behind
        pictures: list[ProcessedPicture] = []
        try:
            while len(pictures) < len(tasks):
                pictures.append(await tasks[len(pictures)])
        finally:
            await _end_tasks(tasks)
        return pictures

    async def _read_picture(
        self, place: str, url: str, turns: asyncio.Semaphore, limits: _Limits
    ) -> ProcessedPicture:
        # Turns are given in order, so the pictures that `before` waits for have theirs.
        with _naming(place):
            async with turns:
                file = await self._read_file(url)
                size = self.processor.measure_picture(*file.upright_size)
                num_tokens = await limits.before + size.num_tokens
                _check_tokens(num_tokens, limits.max_tokens, place)
                limits.behind.set_result(num_tokens)
                limits.reservation.reserve_pixels(size.num_bytes)
                return await self._process_file(file)

    def expand_text(self, text: str, pictures: Sequence[ProcessedPicture]) -> str:
        """Return the prompt with the texts of pictures. Raises ApiError if the prompt does not have
        one placeholder for each picture."""
        try:
            return expand_placeholders(text, pictures, self.processor.placeholder)
        except ValueError as error:
            raise ApiError(str(error), param="messages", code="invalid_value") from None

    def place_items(
        self, prompt: bytes, pictures: Sequence[ProcessedPicture]
    ) -> tuple[bytes, list[Picture]]:
        """Return the tokens of a prompt with `pictures`, and the items with their places. Raises
        ApiError if the prompt does not have one placeholder for each item."""
        try:
            tokens, placed = place_items(np.frombuffer(prompt, "<i4"), pictures, self.token_id)
        except ValueError as error:
            raise ApiError(str(error), param="messages", code="invalid_value") from None
        return tokens.tobytes(), placed

    async def _read_file(self, url: str) -> PictureFile:
        data = await self.sources.read_picture(url)
        return await self.pool.run_task(lambda _: read_picture_file(data))

    async def _process_file(self, file: PictureFile) -> ProcessedPicture:
        # One task decodes and processes, so only running tasks hold a large decoded picture.
        return await self.pool.run_task(
            lambda deadline: self.processor.process_picture(decode_file(file, deadline=deadline))
        )


async def _end_tasks(tasks: list[asyncio.Task[ProcessedPicture]]) -> None:
    """Cancel and remove all tasks. A caller's frame with tasks would keep a failed task's error,
    which keeps the frame, and so pictures, until a collection of garbage."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()


def _check_tokens(num_tokens: int, max_tokens: int, place: str) -> None:
    if num_tokens > max_tokens:
        message = (
            f"the pictures up to `{place}` have {num_tokens} tokens, and a prompt has at most "
            f"{max_tokens}; send fewer or smaller pictures"
        )
        raise ApiError(message, param=place, code="context_length_exceeded")


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Convert errors of the picture at `place` to ApiError."""
    try:
        yield
    except PictureOverload as error:
        message = f"`{place}` cannot be read now: {error}"
        raise ApiError(message, status=503, kind=ENGINE, code="overloaded") from None
    except ValueError as error:  # PictureError too
        message = f"the picture `{place}` cannot be read: {error}"
        raise ApiError(message, param=place, code="invalid_picture") from None
