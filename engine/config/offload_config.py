# SPDX-License-Identifier: Apache-2.0
"""The settings of the tiers below the KV pool, and the engine's options for these tiers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...connector.costs.economics import Choice
from ...tiers.errors import TierConfigError
from ...tiers.registry import installed_tiers
from ...tiers.remote.membership import DEFAULT_PORT, ServerAddress, is_address, parse_address
from ...tiers.settings import readers
from ...tiers.settings.format import format_value
from ...tiers.settings.option import Option, check_options, options_of, setting
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import ConfigError
from ...tiers.tier_settings import (
    CpuSettings,
    ListenAddress,
    PeerSettings,
    RemoteTierSettings,
    ServeSettings,
    SsdSettings,
    TierSettings,
)
from ...tiers.wire.listen import LARGEST_PORT

_LISTEN = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
OFFLOAD_TIERS = ("cpu", "ssd")  # other packages may add tiers
LOAD_FAILURES = ("recompute", "fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig(TierSettings):
    """The settings of the tiers below the KV pool. Raises ConfigError for tiers and values that
    exclude each other."""

    tiers: tuple[str, ...] = setting(
        (), readers.tiers,
        "tiers below the KV pool: cpu or cpu,ssd or cpu,ssd,grpc://host:9400", "TIERS",
        name="kv_offload",
    )  # fmt: skip
    load: str = setting(
        Choice.AUTO.value, readers.one_of(*[choice.value for choice in Choice]),
        "load what a tier has where that is quicker than computing (auto), always, or in both ways "
        "at once", "NAME", name="kv_offload_load",
    )  # fmt: skip
    load_failure: str = setting(
        "recompute", readers.one_of(*LOAD_FAILURES),
        "what a request does whose blocks a tier had and could not bring: recompute them, or fail",
        "NAME", name="kv_offload_load_failure",
    )  # fmt: skip
    faults: str = setting(  # see tiers/testing/fault_plan.py
        "", readers.text,
        "a drill: faults of the tiers below cpu, on purpose: [TIER:]CALL:KIND=VALUE,…", "LIST",
        name="kv_offload_faults",
    )  # fmt: skip
    tier_options: Mapping[str, Mapping[str, str]] = setting(
        dict, readers.tier_options,
        "options of tiers that other packages bring: tier.option=value,…", "LIST",
        name="kv_offload_tier_options",
    )  # fmt: skip
    peers: tuple[str, ...] = setting(
        (), readers.tiers,
        "other engines whose cpu tier is read: grpc://host:9500,…", "ADDRESSES", name="kv_peers",
    )  # fmt: skip
    serve_at: str = setting(
        "", readers.text, "let other engines read the cpu tier here", "HOST:PORT", name="kv_serve",
    )  # fmt: skip
    require_tiers: bool = setting(
        False, readers.switch,
        "refuse to start while a tier below cpu is down, instead of going on without it",
    )  # fmt: skip
    shutdown_seconds: float = 30.0
    # Fields that `__post_init__` sets from the texts of the fields above.
    cache_servers: tuple[ServerAddress, ...] = field(init=False, default=())
    peer_addresses: tuple[ServerAddress, ...] = field(init=False, default=())
    listen_address: ListenAddress | None = field(init=False, default=None)
    other_tiers: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        named = (tier for tier in self.tiers if not is_address(tier))
        other_tiers = tuple(tier for tier in named if tier not in OFFLOAD_TIERS)
        object.__setattr__(self, "other_tiers", other_tiers)
        self._read_tiers()
        self._read_peers()
        if self.has_ssd and self.ssd.path is None:
            raise ConfigError("the ssd tier needs --kv-offload-ssd-path DIR")
        check_options(OFFLOAD_OPTIONS, self)
        self._check_faults()
        others = [tier for tier in self.tiers if tier not in OFFLOAD_TIERS]
        if self.ssd.rounds and others:
            raise ConfigError(
                f"--kv-offload-ssd-codec {self.ssd.codec} loses precision, and from the cpu tier "
                f"such blocks reach {', '.join(others)}; use lossless or none beside other tiers"
            )
        for tier in self.tier_options:
            if tier not in self.other_tiers:
                raise ConfigError(
                    f"--kv-offload-tier-options sets options of {format_value(tier)}, which is "
                    "no tier of another package in --kv-offload; add it there or drop the options"
                )

    @property
    def enabled(self) -> bool:
        return bool(self.tiers)

    @property
    def has_ssd(self) -> bool:
        return "ssd" in self.tiers

    @property
    def reads_others(self) -> bool:
        """Whether this engine can load blocks of other engines, from cache servers or peers."""
        return bool(self.cache_servers or self.peers)

    @property
    def is_read_by_others(self) -> bool:
        """Whether other engines can load this engine's blocks, from cache servers or `serve_at`."""
        return bool(self.cache_servers or self.serve_at)

    @property
    def tier_names(self) -> tuple[str, ...]:
        """The names of the tiers below the KV pool, as in metrics and in answers' usage."""
        return (*self.tiers[:1], *self.store_names)

    def _read_peers(self) -> None:
        for flag, value in (("--kv-peers", self.peers), ("--kv-serve", self.serve_at)):
            if value and "cpu" not in self.tiers:
                raise ConfigError(f"{flag} is for the cpu tier; add --kv-offload cpu or drop it")
        try:
            peers = tuple(map(parse_address, self.peers))
        except TierConfigError as error:
            raise ConfigError(f"--kv-peers: {error}") from error
        if len(set(peers)) != len(peers):
            raise ConfigError(f"--kv-peers names an engine twice: {','.join(self.peers)}")
        if set(peers) & set(self.cache_servers):
            raise ConfigError("--kv-peers and --kv-offload name the same address; drop one of them")
        if len({server.tls for server in peers}) > 1:
            raise ConfigError(
                f"--kv-peers {','.join(self.peers)} names engines with and without TLS; use "
                "grpcs:// for all of them, or grpc:// for all"
            )
        listen = _read_listen_address(self.serve_at) if self.serve_at else None
        for flag, servers in (("--kv-peers", peers), ("--kv-offload", self.cache_servers)):
            if listen in [ListenAddress(server.host, server.port) for server in servers]:
                raise ConfigError(
                    f"{flag} names {self.serve_at}, where this engine itself is (--kv-serve); "
                    f"take it out of {flag}"
                )
        object.__setattr__(self, "peer_addresses", peers)
        object.__setattr__(self, "listen_address", listen)

    def _check_faults(self) -> None:
        try:
            _ = self.drill
        except TierConfigError as error:
            raise ConfigError(
                f"--kv-offload-faults {format_value(self.faults)}: {error}"
            ) from error

    def _read_tiers(self) -> None:
        given = ",".join(self.tiers)
        known = (*OFFLOAD_TIERS, *(installed_tiers() if self.other_tiers else ()))
        for tier in self.tiers:
            if tier not in known and not is_address(tier):
                near = did_you_mean(tier, known)
                raise ConfigError(
                    "--kv-offload takes cpu or cpu,ssd, and addresses of cache servers such as "
                    f"grpc://host:{DEFAULT_PORT}, not {format_value(given)}{near}; "
                    f"installed tiers: {', '.join(known)}"
                )
        try:
            servers = tuple(parse_address(tier) for tier in self.tiers if is_address(tier))
        except TierConfigError as error:
            raise ConfigError(f"--kv-offload {format_value(given)}: {error}") from error
        if len(set(self.tiers)) != len(self.tiers):
            raise ConfigError(f"--kv-offload names a tier twice: {given}; name each once")
        if self.tiers and "cpu" not in self.tiers:
            raise ConfigError(
                f"--kv-offload {given} needs the CPU tier that blocks pass through; use cpu,{given}"
            )
        right = [tier for tier in OFFLOAD_TIERS if tier in self.tiers]
        right += [*self.other_tiers, *(tier for tier in self.tiers if is_address(tier))]
        if right[:2] != list(self.tiers[:2]) or right[-len(servers) :] != list(
            self.tiers[-len(servers) :]
        ):
            raise ConfigError(
                f"--kv-offload names the tiers from the pool down; use {','.join(right)}, "
                f"not {given}"
            )
        if len({server.tls for server in servers}) > 1:
            raise ConfigError(
                f"--kv-offload {given} names cache servers with and without TLS; use grpcs:// for "
                "all of them, or grpc:// for all"
            )
        object.__setattr__(self, "cache_servers", servers)


def _read_listen_address(text: str) -> ListenAddress:
    match = _LISTEN.fullmatch(text.strip())
    if match is None or int(match["port"]) > LARGEST_PORT:
        raise ConfigError(
            f"--kv-serve takes HOST:PORT, such as 127.0.0.1:9500 or [::1]:9500, not "
            f"{format_value(text)}"
        )
    return ListenAddress(match["host"].strip("[]"), int(match["port"]))


def _offload_options() -> dict[str, Option]:
    """Return the options in the order of the help text, each with its path below OffloadConfig."""
    own = options_of(OffloadConfig, "")
    cpu = options_of(CpuSettings, "cpu", "kv_offload_cpu_")
    return {
        "kv_offload": own.pop("kv_offload"),
        "kv_offload_policy": cpu.pop("kv_offload_cpu_policy"),
        **{name: own.pop(name) for name in list(own)[:3]},
        **cpu,
        **options_of(SsdSettings, "ssd", "kv_offload_ssd_"),
        **options_of(RemoteTierSettings, "remote", "kv_offload_remote_"),
        "kv_peers": own.pop("kv_peers"),
        **options_of(PeerSettings, "peer", "kv_peers_"),
        "kv_serve": own.pop("kv_serve"),
        **options_of(ServeSettings, "serve", "kv_serve_"),
        **own,
    }


OFFLOAD_OPTIONS: Mapping[str, Option] = _offload_options()
