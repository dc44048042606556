# SPDX-License-Identifier: Apache-2.0
"""`stratakv route`: runs a proxy in front of prefill and decode nodes.

The proxy needs neither a model nor torch. After SIGINT or SIGTERM the proxy accepts no new
connections, lets running requests finish for at most --drain-seconds, and ends."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
from ipaddress import ip_address
from typing import TYPE_CHECKING

from ...tiers.settings.option import read_fields
from ...tiers.settings.values import ConfigError
from .. import logs
from ..config.optional_packages import install_extra
from ..router.router_settings import ROUTER_OPTIONS, RouterConfig, read_node
from .args import add_options
from .serve import bind

if TYPE_CHECKING:
    from ..router.router import Router

DESCRIPTION = "Send requests to prefill and decode nodes, and their answers back."

logger = logging.getLogger(__name__)

# Seconds after --drain-seconds for sending a last event to clients whose answers have not ended.
_LAST_WORDS_SECONDS = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for role, text in (
        ("decode", "a node that answers requests; may be given several times, and one is needed"),
        ("prefill", "a node that computes long prompts first; may be given several times"),
    ):
        parser.add_argument(
            f"--{role}", metavar="URL", action="append", default=argparse.SUPPRESS, help=text
        )
    add_options(parser, ROUTER_OPTIONS)


def router_config(args: argparse.Namespace) -> RouterConfig:
    """Return the router's settings from parsed arguments. Raises ConfigError."""
    given = vars(args)
    values = read_fields(ROUTER_OPTIONS, given)
    for role in ("decode", "prefill"):
        values[role] = tuple(read_node(f"--{role}", url) for url in given.get(role, ()))
    return RouterConfig(**values)


def run(args: argparse.Namespace) -> int:
    """Run the router until a signal, and return 0."""
    config = router_config(args)
    try:
        from ..router.router import Router, read_admin_key
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the package {error.name} is not installed and the router needs it; run in a clone of "
            f"StrataKV: {install_extra('router')}"
        ) from error
    router = Router(config, admin_key=read_admin_key(config.admin_key_file))
    sock = bind(config.host, config.port)
    logs.set_up(config.log_level, json=config.log_json)
    with sock:
        return asyncio.run(_route(config, router, sock))


async def _route(config: RouterConfig, router: Router, sock: socket.socket) -> int:
    from ..api.http.http_server import make_server

    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    await router.start()
    http = make_server(
        router,
        log_level=config.log_level,
        shutdown_seconds=config.drain_seconds + _LAST_WORDS_SECONDS,
        max_message_bytes=config.max_body_bytes,
    )
    logs.adopt("uvicorn")
    running = asyncio.ensure_future(http.serve(sockets=[sock]))
    waiting = asyncio.ensure_future(told.wait())
    try:
        _announce(config, router, sock)
        await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
        logger.info(
            "shutting down; %d requests are open and have %g s to end",
            router.num_open,
            config.drain_seconds,
        )
        http.should_exit = True
        loop.call_later(config.drain_seconds, router.end_requests)
        await running
    finally:
        waiting.cancel()
        await router.close()
    return 0


def _announce(config: RouterConfig, router: Router, sock: socket.socket) -> None:
    host, port = sock.getsockname()[:2]
    if not ip_address(host.partition("%")[0]).is_loopback:
        logger.warning(
            "any client that reaches %s may use the nodes that admit it; start them with "
            "--api-key, which clients send and the router passes on",
            host,
        )
    host = f"[{host}]" if ":" in host else host
    up = sum(router.nodes.num_up(role) for role in router.nodes.of_role)
    refused = sum(map(router.nodes.num_refused, router.nodes.of_role))
    state = f"{up} up, {refused} refused: see the log" if refused else f"{up} up"
    logs.announce(
        f"StrataKV routes at http://{host}:{port} to {len(config.prefill)} prefill and "
        f"{len(config.decode)} decode nodes ({state}); Ctrl-C ends it"
    )
