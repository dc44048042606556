# SPDX-License-Identifier: Apache-2.0
"""`stratakv serve MODEL`: the HTTP server in this process, the engine core in its own.

The port is bound before the model is loaded, so that a port in use is known at once. A signal ends
it in an orderly way: no new requests, running ones may finish for a while, tiers are written back.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import signal
import socket
import sys
from typing import TYPE_CHECKING

from ..client.base import EngineDead
from ..config import ConfigError, EngineConfig
from .args import add_engine_arguments, add_log_level, engine_config_of, log_level, whole_number

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ..api.settings import ApiSettings
    from ..client.process import ProcessClient

DESCRIPTION = "Serve a model over HTTP, in the form of OpenAI's API."

logger = logging.getLogger(__name__)

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
_BACKLOG = 2048
# For requests that run when the end is asked for.
_REQUEST_SECONDS = 5.0
# Beyond the time that the tiers are given to write back.
_CLOSE_GRACE_SECONDS = 10.0
EXIT_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The server's flags and the engine's."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", metavar="ADDRESS", default=DEFAULT_HOST, help=f"default: {DEFAULT_HOST}"
    )
    group.add_argument(
        "--port",
        metavar="N",
        default=str(DEFAULT_PORT),
        help=f"default: {DEFAULT_PORT}; 0 takes a free one",
    )
    group.add_argument("--api-key", metavar="KEY", help="ask clients for this key")
    group.add_argument(
        "--enable-dev-routes", action="store_true", help="routes for tests, such as cache resets"
    )
    add_log_level(parser, "info")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal (0) or until the core is gone (1)."""
    from ..api.settings import ApiSettings

    config = engine_config_of(args)
    level = log_level(args)
    settings = ApiSettings(api_key=args.api_key, enable_dev_routes=args.enable_dev_routes)
    sock = bind(args.host, whole_number("--port", args.port, 0, 65535))
    logging.basicConfig(
        level=level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    with sock:
        return asyncio.run(_serve(config, settings, sock, level))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError where there can be none."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--host {host or repr(host)} is no address of this machine ({error}); use 127.0.0.1 "
            "or 0.0.0.0"
        ) from error
    sock = socket.socket(info[0], info[1], info[2])
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(info[4])
        # Already now, or another process could still take the port while the model is loaded.
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(_explain_bind(error, host, port)) from error
    return sock


def _explain_bind(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; end what uses it or take another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} may not be opened by this user; take one from 1024 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is no address of this machine; use 127.0.0.1 or 0.0.0.0"
    return f"{host}:{port} cannot be opened ({error.strerror}); choose --host and --port anew"


async def _serve(
    config: EngineConfig, settings: ApiSettings, sock: socket.socket, level: str
) -> int:
    from ..client.process import ProcessClient
    from ..text.tokenizer import Tokenizer

    has_tokenizer = (config.model.path / "tokenizer.json").is_file()
    tokenizer = Tokenizer.load(config.model.path) if has_tokenizer else None
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)

    starting = asyncio.ensure_future(ProcessClient.start(config, log_level=level))
    if not await _unless(told, starting):
        return 0
    client = starting.result()
    try:
        from ..api.app import create_app

        app = create_app(
            client,
            model_name=config.model.served_name,
            model_path=config.model.path,
            tokenizer=tokenizer,
            settings=settings,
        )
        return await _serve_app(app, client, config, sock, level, told)
    finally:
        await client.close(config.offload.shutdown_seconds + _CLOSE_GRACE_SECONDS)


async def _serve_app(
    app: FastAPI,
    client: ProcessClient,
    config: EngineConfig,
    sock: socket.socket,
    level: str,
    told: asyncio.Event,
) -> int:
    """Until told to stop (0) or until the core is gone (1)."""
    from ..api.server import make_server

    server = make_server(app, log_level=level, shutdown_seconds=_REQUEST_SECONDS)
    running = asyncio.ensure_future(server.serve(sockets=[sock]))
    dead = asyncio.ensure_future(client.wait_dead())
    host, port = sock.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    print(
        f"StrataKV serves {config.model.served_name} at http://{host}:{port}"
        f" (context {client.ready.max_model_len}, {client.ready.num_blocks} blocks of"
        f" {client.ready.block_size} tokens); Ctrl-C ends it",
        flush=True,
    )
    asking = asyncio.ensure_future(told.wait())
    try:
        await asyncio.wait((running, dead, asking), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await running
    finally:
        asking.cancel()
        dead.cancel()
    if dead.done() and not dead.cancelled():
        raise EngineDead(dead.result())
    return 0


async def _unless(told: asyncio.Event, starting: asyncio.Future[ProcessClient]) -> bool:
    """Wait for the start; False where the end was asked for first, and nothing is left then."""
    asking = asyncio.ensure_future(told.wait())
    await asyncio.wait((starting, asking), return_when=asyncio.FIRST_COMPLETED)
    asking.cancel()
    if starting.done():
        return True
    starting.cancel()
    await asyncio.wait((starting,))
    return False
