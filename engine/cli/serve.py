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
from ipaddress import ip_address
from typing import TYPE_CHECKING

from .. import logs
from ..client.base import EngineDead
from ..config import EngineConfig
from ..config_values import ConfigError, show_size
from ..settings.server import ServerConfig, server_config
from .args import add_engine_arguments, add_server_arguments, engine_config_of, settings_of

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ..api.settings import ApiSettings
    from ..client.process import ProcessClient
    from ..wire import Ready

DESCRIPTION = "Serve a model over HTTP, in the form of OpenAI's API."

logger = logging.getLogger(__name__)

_BACKLOG = 2048
# For requests that run when the end is asked for.
_REQUEST_SECONDS = 5.0
# Beyond it, for the last event of answers that had not ended by then.
_LAST_WORDS_SECONDS = 3.0
# Beyond the time that the tiers are given to write back.
_CLOSE_GRACE_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The server's flags and the engine's."""
    add_server_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal (0) or until the core is gone (1)."""
    from ..api.settings import ApiSettings

    config = engine_config_of(args)
    settings = settings_of(args)
    server = server_config(settings.server_options)
    api = ApiSettings(api_key=server.api_key, enable_dev_routes=server.enable_dev_routes)
    sock = bind(server.host, server.port)
    logs.set_up(server.log_level, json=server.log_json)
    logger.info("options given: %s", settings.summary or "none")
    for note in settings.notes:
        logger.info("%s", note)
    with sock:
        return asyncio.run(_serve(config, server, api, sock))


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
    config: EngineConfig, server: ServerConfig, api: ApiSettings, sock: socket.socket
) -> int:
    from ..client.process import ProcessClient
    from ..models.generation_config import load_default_sampling
    from ..text.tokenizer import Tokenizer

    tokenizer = Tokenizer.find(config.model.path)
    recommends = server.generation_config == "auto"
    default_sampling = load_default_sampling(config.model.path) if recommends else {}
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)

    starting = asyncio.ensure_future(
        ProcessClient.start(config, log_level=server.log_level, log_json=server.log_json)
    )
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
            settings=api,
            default_sampling=default_sampling,
        )
        return await _serve_app(app, client, config, server, sock, told)
    finally:
        await client.close(config.offload.shutdown_seconds + _CLOSE_GRACE_SECONDS)


async def _serve_app(
    app: FastAPI,
    client: ProcessClient,
    config: EngineConfig,
    server: ServerConfig,
    sock: socket.socket,
    told: asyncio.Event,
) -> int:
    """Until told to stop (0) or until the core is gone (1)."""
    from ..api.server import make_server
    from ..api.stats_log import StatsLog

    http = make_server(
        app, log_level=server.log_level, shutdown_seconds=_REQUEST_SECONDS + _LAST_WORDS_SECONDS
    )
    logs.adopt("uvicorn")
    running = asyncio.ensure_future(http.serve(sockets=[sock]))
    dead = asyncio.ensure_future(client.wait_dead())
    asking = asyncio.ensure_future(told.wait())
    figures = asyncio.ensure_future(StatsLog(client).run()) if server.log_stats else None
    try:
        _tell_start(config, server, client.ready, sock)
        await asyncio.wait((running, dead, asking), return_when=asyncio.FIRST_COMPLETED)
        in_flight = app.state.in_flight
        logger.info(
            "shutting down; %d requests are being answered and have %g s to end",
            in_flight.count,
            _REQUEST_SECONDS,
        )
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # the line above is enough
        http.should_exit = True
        asyncio.get_running_loop().call_later(_REQUEST_SECONDS, in_flight.end)
        await running
    finally:
        for task in (asking, dead, figures):
            if task is not None:
                task.cancel()
    if dead.done() and not dead.cancelled():
        raise EngineDead(dead.result())
    return 0


def _tell_start(
    config: EngineConfig, server: ServerConfig, ready: Ready, sock: socket.socket
) -> None:
    """What a person wants to know in the log, and the ready line on standard output."""
    model, offload = config.model, config.offload
    logger.info("model %s, dtype %s", model.path, model.dtype)
    tokens = ready.num_blocks * ready.block_size
    logger.info("KV pool of %s tokens, for requests of up to %s", tokens, ready.max_model_len)
    if offload.enabled:
        sizes = {"cpu": offload.cpu_bytes, "ssd": offload.ssd_bytes}
        tiers = ", ".join(
            f"{tier} {show_size(sizes[tier])}" if tier in sizes else tier for tier in offload.tiers
        )
        logger.info("tiers below the pool: %s", tiers)
    else:
        logger.info("no tiers below the pool; --kv-offload cpu,ssd adds them")
    host, port = sock.getsockname()[:2]
    if server.api_key is None and not ip_address(host.partition("%")[0]).is_loopback:
        logger.warning("whoever reaches %s may use this server; --api-key asks for a key", host)
    host = f"[{host}]" if ":" in host else host
    logs.announce(
        f"StrataKV serves {model.served_name} at http://{host}:{port} (context"
        f" {ready.max_model_len}, {ready.num_blocks} blocks of {ready.block_size} tokens); Ctrl-C"
        " ends it"
    )


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
