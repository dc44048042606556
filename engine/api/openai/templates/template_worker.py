# SPDX-License-Identifier: Apache-2.0
"""`python -m stratakv.engine.api.openai.templates.template_worker FD`: compiles and renders chat
templates for its parent process, which sends questions over the socket FD.

One expression of a template can need gigabytes of memory or hours in C code, which Python cannot
stop. The operating system can stop C code: beyond the memory limit an allocation fails, and beyond
the time limit the process ends. The module imports little, so that a new process starts fast.

    question  {"key": …, "source": … or null, "seconds": …, "context": …, "max_characters": …}
    answer    {"text": …}, {"refused": why}, or {"broken": why} for an invalid template

Question and answer are JSON, each after its length in four bytes. For a question without a context,
the worker only compiles the template. JSON is used because msgpack has no numbers of any size and
no lone surrogates."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import sys
from collections import OrderedDict
from typing import Any

import jinja2

from .sandbox import TemplateRefused, compile_template, render_template

LENGTH = struct.Struct("!I")
# Limit of the process's memory, beyond its memory at the start. A long conversation takes 100 MiB.
MAX_MEMORY_BYTES = 768 * 1024**2
MAX_TEMPLATES = 8
_ALIVE_SECONDS = 10.0  # between two checks that the parent process still runs

MEMORY = (
    f"the chat template took more than {MAX_MEMORY_BYTES // 1024**2} MiB of memory and was "
    "stopped; send a shorter conversation"
)


def main() -> None:
    """Answer questions until the parent process has ended."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.settimeout(_ALIVE_SECONDS)
    _limit_memory()
    # The process may have inherited a handler or a blocked signal from its parent.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    templates: OrderedDict[str, jinja2.Template] = OrderedDict()
    parent = os.getppid()
    while (body := _read_frame(connection, parent)) is not None:
        answer = json.dumps(_answer(body, templates)).encode()
        connection.settimeout(None)
        connection.sendall(LENGTH.pack(len(answer)) + answer)
        connection.settimeout(_ALIVE_SECONDS)


def _answer(body: bytes, templates: OrderedDict[str, jinja2.Template]) -> dict[str, str]:
    try:
        question: dict[str, Any] = json.loads(body)
        # SIGPROF ends the process after `seconds` of processor time, also within C code.
        signal.setitimer(signal.ITIMER_PROF, question["seconds"])
        return _work(question, templates)
    except MemoryError:
        return {"refused": MEMORY}
    except RecursionError:
        return {"refused": "the conversation nests lists or objects too deeply; send a flat one"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _work(question: dict[str, Any], templates: OrderedDict[str, jinja2.Template]) -> dict[str, str]:
    key = question["key"]
    if key not in templates:
        try:
            templates[key] = compile_template(question["source"])
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the source is not trusted
            return {"broken": str(error) or type(error).__name__}
        while len(templates) > MAX_TEMPLATES:
            templates.popitem(last=False)
    templates.move_to_end(key)
    if question["context"] is None:
        return {"text": ""}
    try:
        text = render_template(templates[key], question["context"], question["max_characters"])
    except TemplateRefused as refused:
        return {"refused": str(refused)}
    return {"text": text}


def _limit_memory() -> None:
    pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115 - read only once
    most = pages * resource.getpagesize() + MAX_MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or hard > most:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read_frame(connection: socket.socket, parent: int) -> bytes | None:
    """Return the next question; None if the socket is closed or the parent has ended. After the
    parent's end, another child of the parent may keep the socket open."""
    data = bytearray()
    size = LENGTH.size
    has_length = False
    while len(data) < size:
        try:
            piece = connection.recv(min(size - len(data), 1024**2))
        except TimeoutError:
            if os.getppid() != parent:
                return None
            continue
        if not piece:
            return None
        data += piece
        if len(data) == size and not has_length:
            (size,) = LENGTH.unpack(data)
            data.clear()
            has_length = True
    return bytes(data)


if __name__ == "__main__":
    main()
