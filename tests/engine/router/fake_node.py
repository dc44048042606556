# SPDX-License-Identifier: Apache-2.0
"""A node as a router sees it: a tiny HTTP server that does what its script says, and else answers
what is right. What is right is known for every prompt: it "computes" `tokens_of(prompt)`.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NUM_TOKENS = 8
WIDE = "a prompt whose tokens are long"


def tokens_of(prompt: str, count: int = NUM_TOKENS) -> list[str]:
    """What every node answers to a prompt."""
    end = "." * 10_000 if prompt == WIDE else " "
    return [f"{zlib.crc32(f'{prompt}/{number}'.encode()):08x}{end}" for number in range(count)]


@dataclass
class Fault:
    """What one request meets. `after`: events of the stream that come before it."""

    kind: str
    after: int = 0
    status: int = 503
    body: bytes = b""  # of `body`


@dataclass
class Seen:
    """One request as a node saw it."""

    target: str
    headers: dict[str, str]
    raw: bytes
    body: Any  # decoded; None where it is no JSON


class FakeNode:
    """A tiny HTTP server that does what its script says, and else what is right."""

    def __init__(self) -> None:
        self.script: deque[Fault] = deque()
        self.seen: list[Seen] = []
        self.parts: list[list[Any]] = []  # the lines of each prompt in parts
        self.followed: list[Seen] = []
        self.follows: bool | None = True  # None: it never says
        self.health = 200
        self.identity: Any = 404  # what /node answers; a number is the status of a refusal
        self.node_asked = 0
        self.is_hung = False
        self.params: Any = None  # what its answers hand over
        self.sent_bytes = 0
        self.num_lost = 0  # connections that the router closed before the answer was whole
        self.port = 0
        self.go_on = asyncio.Event()  # for those that wait
        self.tls: ssl.SSLContext | None = None
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    @property
    def num_open(self) -> int:
        return len(self._writers)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections from now on, and reset those that are open."""
        assert self._server is not None
        self._server.close()
        self.kill()
        self.go_on.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        """Reset every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.num_lost += 1
        finally:
            writer.close()
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        if headers.get("transfer-encoding") == "chunked":
            await self._answer_parts(target, headers, reader, writer)
            return
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if self.is_hung:
            await self._hang(reader)
            return
        if target == "/health":
            await self._send(writer, self.health, {"status": self.health})
            return
        if target == "/node":
            self.node_asked += 1
            if self.identity == "hang":
                await self._hang(reader)
            elif isinstance(self.identity, int):
                await self._send(writer, self.identity, {})
            else:
                await self._send(writer, 200, self.identity)
            return
        if target.startswith("/follow/"):
            self.followed.append(Seen(target, headers, body, _decoded(body)))
            if self.follows is None:
                await self._hang(reader)
            else:
                await self._send(writer, 200 if self.follows else 404, {})
            return
        self.seen.append(Seen(target, headers, body, _decoded(body)))
        fault = self.script.popleft() if self.script else Fault("none")
        await self._play(fault, self.seen[-1], method, reader, writer)

    async def _answer_parts(
        self,
        target: str,
        headers: dict[str, str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Read the lines of a prompt in parts as they come, and answer the whole of it. The faults
        `lost` and `status` come when `after` lines have, others behind the last one."""
        fault = self.script.popleft() if self.script else Fault("none")
        mine: list[Any] = []
        self.parts.append(mine)
        raw = b""
        while size := int(await reader.readuntil(b"\n"), 16):
            raw += (await reader.readexactly(size + 2))[:-2]
            *lines, raw = raw.split(b"\n")
            for line in lines:
                mine.append(json.loads(line))
                if fault.kind == "lost" and len(mine) == fault.after:
                    writer.transport.abort()
                    return
                if fault.kind == "status" and len(mine) == fault.after:
                    error = {"error": {"message": "no", "type": "x", "param": None, "code": "bad"}}
                    await self._send(writer, fault.status, error)
                    return
        await reader.readuntil(b"\n")
        whole = {**mine[0], "prompt": "".join(each.get("prompt", "") for each in mine)}
        self.seen.append(Seen(target, headers, raw, whole))
        await self._play(fault, self.seen[-1], "POST", reader, writer)

    async def _play(
        self,
        fault: Fault,
        seen: Seen,
        method: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        kind = fault.kind
        if kind == "reset":
            writer.transport.abort()
        elif kind == "close":
            pass
        elif kind == "half a head":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Ty")
            writer.transport.abort() if fault.after else await writer.drain()
        elif kind == "garbage":
            writer.write(b"220 smtp.example ESMTP\r\n")
        elif kind == "endless head":
            writer.write(b"HTTP/1.1 200 OK\r\n" + b"x-filler: 1\r\n" * 20_000)
        elif kind == "status":
            error = {"error": {"message": f"fault {fault.status}", "type": "x"}}
            await self._send(writer, fault.status, error)
        elif kind == "body":
            head = f"HTTP/1.1 {fault.status} X\r\ncontent-length: {len(fault.body)}\r\n\r\n"
            writer.write(head.encode() + fault.body)
            await writer.drain()
        elif kind == "hang" and not fault.after:
            await self._hang(reader)
        elif kind == "wait":
            await self.go_on.wait()
            await self._right(seen, method, writer)
        elif seen.body and seen.body.get("stream"):
            await self._stream(fault, seen, reader, writer)
        elif kind in ("die", "die in an event", "short"):
            text = json.dumps(self._whole(seen)).encode()
            head = (
                f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(text)}"
            )
            writer.write(head.encode() + b"\r\n\r\n" + text[: len(text) // 2])
            await writer.drain()
        elif kind == "hang":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n12")
            await self._hang(reader)
        elif kind == "no length":
            text = json.dumps(self._whole(seen)).encode()
            end = len(text) // 2 if fault.after else len(text)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + text[:end])
        else:
            await self._right(seen, method, writer)

    async def _right(self, seen: Seen, method: str, writer: asyncio.StreamWriter) -> None:
        if seen.body and seen.body.get("stream"):
            await self._stream(Fault("none"), seen, None, writer)
        elif seen.target.startswith(("/v1/completions", "/v1/chat/completions")):
            await self._send(writer, 200, self._whole(seen))
        else:
            await self._send(writer, 200, {"path": seen.target, "method": method})

    def _whole(self, seen: Seen) -> dict[str, Any]:
        count = seen.body.get("max_tokens", NUM_TOKENS)
        answer = {"choices": [{"text": "".join(tokens_of(prompt_in(seen.body), count))}]}
        return answer if self.params is None else {**answer, "kv_transfer_params": self.params}

    async def _stream(
        self,
        fault: Fault,
        seen: Seen,
        reader: asyncio.StreamReader | None,
        writer: asyncio.StreamWriter,
    ) -> None:
        is_chunked = fault.kind != "no length"
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        writer.write(head + (b"transfer-encoding: chunked\r\n\r\n" if is_chunked else b"\r\n"))
        tokens = tokens_of(prompt_in(seen.body), seen.body.get("max_tokens", NUM_TOKENS))
        events = [json.dumps({"choices": [{"text": token}]}) for token in tokens]
        for number, event in enumerate([*events, "[DONE]"]):
            data = f"data: {event}\n\n".encode()
            if fault.kind != "none" and number == fault.after and fault.kind != "flood":
                if fault.kind == "hang":
                    assert reader is not None
                    await self._hang(reader)
                    return
                if fault.kind in ("die", "die in an event", "no length"):
                    part = data[: len(data) // 2] if fault.kind == "die in an event" else b""
                    if part:
                        self._write(writer, part, is_chunked)
                    await writer.drain()
                    writer.transport.abort() if fault.kind == "die" else None
                    return
            if fault.kind == "crumbs":  # byte by byte
                for byte in data:
                    self._write(writer, bytes((byte,)), is_chunked)
                    await writer.drain()
            else:
                self._write(writer, data, is_chunked)
            await writer.drain()
        if fault.kind == "crumbs" or is_chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _write(self, writer: asyncio.StreamWriter, data: bytes, is_chunked: bool) -> None:
        self.sent_bytes += len(data)
        writer.write(b"%x\r\n%s\r\n" % (len(data), data) if is_chunked else data)

    async def _send(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        head = (
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\nserver: fake\r\nx-node: yes\r\n\r\n" + body)
        await writer.drain()

    async def _hang(self, reader: asyncio.StreamReader) -> None:
        """Until the other side gives up."""
        while await reader.read(4096):
            pass
        self.num_lost += 1


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def prompt_in(body: Mapping[str, Any]) -> str:
    """Of completions, or the first message of a chat."""
    return str(body["prompt"] if "prompt" in body else body["messages"][0]["content"])
