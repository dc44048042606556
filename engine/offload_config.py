# SPDX-License-Identifier: Apache-2.0
"""The settings of the tiers below the pool. Checks itself, as the other settings do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..connector.economics import Choice
from ..tiers.admission import DEFAULT_FILTER, FILTERS, known_filters
from ..tiers.errors import TierConfigError
from ..tiers.fault_injection.store import Drill, parse_drill
from ..tiers.policies.choice import DEFAULT_POLICY, DEFAULT_SSD_POLICY, POLICIES, known_policies
from ..tiers.registry import installed_tiers
from ..tiers.remote.address import DEFAULT_PORT, ServerAddress, is_address, parse_address
from ..tiers.settings.format import format_value
from ..tiers.settings.suggestions import did_you_mean
from ..tiers.settings.values import GIB, MAX_THREADS, MIB, ConfigError, one_of, size_within, within

REMOTE = "remote"  # the tier that cache servers are together
OFFLOAD_TIERS = ("cpu", "ssd")  # beside those that other packages bring
DURABILITIES = ("sync", "async")
LOAD_FAILURES = ("recompute", "fail")
SSD_CODECS = ("none", "lossless", "fp8")


def has_tier(tiers: Iterable[str], tier: str) -> bool:
    """Whether a tier is among those that `--kv-offload` names."""
    return any(map(is_address, tiers)) if tier == REMOTE else tier in tiers


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """The tiers below the pool."""

    tiers: tuple[str, ...] = ()
    policy: str = DEFAULT_POLICY
    load: str = Choice.AUTO.value
    load_failure: str = "recompute"
    faults: str = ""  # of the tiers below cpu, on purpose; see tiers/fault_injection
    cpu_bytes: int = 4 * GIB
    cpu_huge_pages: bool = False
    ssd_path: Path | None = None
    ssd_bytes: int = 20 * GIB
    ssd_durability: str = "sync"
    ssd_codec: str = "none"
    ssd_policy: str = DEFAULT_SSD_POLICY
    ssd_admission: str = DEFAULT_FILTER
    ssd_daily_bytes: int | None = None
    ssd_exclusive: bool = False
    ssd_mac_key_file: Path | None = None
    # Of cache servers, whose addresses stand among the tiers.
    remote_token_file: Path | None = None
    remote_ca_file: Path | None = None
    remote_cert_file: Path | None = None
    remote_key_file: Path | None = None
    remote_server_name: str | None = None
    remote_tag_key_file: Path | None = None
    # For tiers that other packages bring: tier → option → value.
    tier_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    require_tiers: bool = False  # refuse to start while one is down
    io_threads: int = 4
    shutdown_seconds: float = 30.0

    def __post_init__(self) -> None:
        self._check_tiers()
        if "ssd" in self.tiers and self.ssd_path is None:
            raise ConfigError("the ssd tier needs --kv-offload-ssd-path DIR")
        for flag, policy in (
            ("--kv-offload-policy", self.policy),
            ("--kv-offload-ssd-policy", self.ssd_policy),
        ):
            if policy not in POLICIES:
                one_of(flag, policy, tuple(known_policies()))
        one_of("--kv-offload-load", self.load, tuple(choice.value for choice in Choice))
        one_of("--kv-offload-load-failure", self.load_failure, LOAD_FAILURES)
        self._check_faults()
        one_of("--kv-offload-ssd-durability", self.ssd_durability, DURABILITIES)
        one_of("--kv-offload-ssd-codec", self.ssd_codec, SSD_CODECS)
        if self.ssd_admission not in FILTERS:
            one_of("--kv-offload-ssd-admission", self.ssd_admission, tuple(known_filters()))
        size_within("--kv-offload-cpu-bytes", self.cpu_bytes, 1 * MIB)
        size_within("--kv-offload-ssd-bytes", self.ssd_bytes, 16 * MIB)
        if self.ssd_daily_bytes is not None:
            size_within("--kv-offload-ssd-daily-bytes", self.ssd_daily_bytes, 1 * MIB)
        within("the number of I/O threads", self.io_threads, 1, MAX_THREADS)
        others = [tier for tier in self.tiers if tier not in OFFLOAD_TIERS]
        if self.ssd_codec == "fp8" and others:
            raise ConfigError(
                "--kv-offload-ssd-codec fp8 loses precision, and from the cpu tier such blocks "
                f"reach {', '.join(others)}; use lossless or none beside other tiers"
            )
        for tier in self.tier_options:
            if tier not in self.other_tiers:
                raise ConfigError(
                    f"--kv-offload-tier-options sets options of {format_value(tier)}, which is "
                    f"no tier of "
                    "another package in --kv-offload; add it there or drop the options"
                )

    @property
    def enabled(self) -> bool:
        return bool(self.tiers)

    @property
    def other_tiers(self) -> tuple[str, ...]:
        """The tiers that other packages bring."""
        return tuple(
            tier for tier in self.tiers if tier not in OFFLOAD_TIERS and not is_address(tier)
        )

    @property
    def cache_servers(self) -> tuple[ServerAddress, ...]:
        """The cache servers that are one tier together, the last one."""
        return tuple(parse_address(tier) for tier in self.tiers if is_address(tier))

    @property
    def tier_names(self) -> tuple[str, ...]:
        """All tiers below the pool, as metrics and answers call them."""
        return (*self.tiers[:1], *self.store_names)

    @property
    def store_names(self) -> tuple[str, ...]:
        """The tiers below the slab, as metrics and drills call them."""
        named = tuple(tier for tier in self.tiers[1:] if not is_address(tier))
        return (*named, REMOTE) if self.cache_servers else named

    @property
    def drill(self) -> Drill | None:
        """The faults to inject; None where none were asked for."""
        return parse_drill(self.faults, self.store_names) if self.faults else None

    def _check_faults(self) -> None:
        try:
            _ = self.drill
        except TierConfigError as error:
            raise ConfigError(
                f"--kv-offload-faults {format_value(self.faults)}: {error}"
            ) from error

    def _check_tiers(self) -> None:
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
            servers = self.cache_servers
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
