# SPDX-License-Identifier: Apache-2.0
"""The settings of the tiers. Most fields are also options, for which `setting` gives a default, a
parser and a help text.

`settings/option.py` makes flags, environment variables and keys of configuration files from these
options, and `assemble.py` builds the tiers. A new option needs a field in this module and code that
uses the field."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from .admission import DEFAULT_FILTER, FILTERS, known_filters
from .codecs.known_codecs import CODECS, DEFAULT_CODEC, NONE, ROUNDING_CODECS
from .hierarchy.hierarchy_options import READ_SECONDS, WATERMARK
from .policies.known_policies import DEFAULT_POLICY, DEFAULT_SSD_POLICY, POLICIES, known_policies
from .remote.credentials import Credentials
from .remote.membership import ServerAddress
from .remote.remote_settings import LOOKUP_SECONDS
from .settings import readers
from .settings.option import setting
from .settings.values import GIB, MAX_THREADS, MIB, ConfigError, within

if TYPE_CHECKING:
    from .testing.faulty_store import Drill

REMOTE = "remote"  # the name of the tier of all cache servers
PEER = "peer"  # the name of the tier of all other engines
DURABILITIES = ("sync", "async")
MAX_DISKS = 16
# The longest useful time of a look-up, in which the engine could compute the prompt.
MAX_LOOKUP_SECONDS = 60.0

_policy = readers.one_of_these_or(POLICIES, known_policies)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSettings:
    """The settings of the slab. Options and help texts call the slab the cpu tier."""

    policy: str = setting(
        DEFAULT_POLICY, _policy,
        f"what the cpu tier evicts: {', '.join(POLICIES)}, or a policy of a package", "NAME",
    )  # fmt: skip
    capacity_bytes: int = setting(
        4 * GIB, readers.size, "size of the cpu tier", "SIZE", name="bytes", least_bytes=1 * MIB
    )
    huge_pages: bool = setting(False, readers.switch, "take the cpu tier's memory in huge pages")
    populate_threads: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdSettings:
    """The settings of the SSD tier. `path` is one directory, or several separated by commas, one on
    each disk (see `paths`). The directories share `capacity_bytes` evenly. `daily_bytes` limits the
    bytes written per day, except at shutdown. With `mac_key_file` the tier seals its records with
    the key in the file, and refuses records that were written without this key."""

    path: Path | None = setting(
        None, readers.path, "directory of the ssd tier, or of several disks by commas", "DIR",
        "~/.cache/stratakv/ssd",
    )  # fmt: skip
    capacity_bytes: int = setting(
        20 * GIB, readers.size, "size of the ssd tier", "SIZE", name="bytes", least_bytes=16 * MIB
    )
    durability: str = setting(
        "sync", readers.one_of(*DURABILITIES),
        "sync: what was stored outlives a kill and a power cut; async: but for the last 2 seconds",
        "NAME",
    )  # fmt: skip
    codec: str = setting(
        DEFAULT_CODEC, readers.one_of(NONE, *CODECS, *ROUNDING_CODECS),
        "how blocks are packed on their way to the disk: "
        + ", ".join([NONE, *CODECS, *ROUNDING_CODECS]),
        "NAME",
    )  # fmt: skip
    policy: str = setting(
        DEFAULT_SSD_POLICY, _policy,
        f"what the ssd tier evicts: {', '.join(POLICIES)}, or a policy of a package", "NAME",
    )  # fmt: skip
    admission: str = setting(
        DEFAULT_FILTER, readers.one_of_these_or(FILTERS, known_filters),
        f"which evicted blocks are written: {', '.join(FILTERS)}, or a filter of a package", "NAME",
    )  # fmt: skip
    daily_bytes: int | None = setting(
        None, readers.size, "most that is written to the ssd in a day", "SIZE", "no bound",
        least_bytes=1 * MIB,
    )  # fmt: skip
    exclusive: bool = setting(
        False, readers.switch, "keep a block either in the cpu tier or in the ssd tier"
    )
    mac_key_file: Path | None = setting(
        None, readers.path,
        "file with the key that seals blocks on a disk that others can write", "FILE",
    )  # fmt: skip
    io_threads: int = 4

    def __post_init__(self) -> None:
        within("the number of I/O threads", self.io_threads, 1, MAX_THREADS)
        _check_apart(self.paths)

    @property
    def rounds(self) -> bool:
        """Whether the codec rounds K and V, so that a loaded block has less precision."""
        return self.codec in ROUNDING_CODECS

    @property
    def paths(self) -> tuple[Path, ...]:
        """The directories, one for each disk; empty if `path` is None."""
        if self.path is None:
            return ()
        return tuple(Path(part.strip()).expanduser() for part in str(self.path).split(","))

    def below(self, folder: str) -> SsdSettings:
        """Return a copy of the settings in which `folder` is appended to each directory."""
        return replace(self, path=Path(",".join(str(path / folder) for path in self.paths)))


def _check_apart(paths: Sequence[Path]) -> None:
    """Raise ConfigError for too many, equal, nested or unnamed directories."""
    if any(path == Path() for path in paths):
        raise ConfigError(
            "an ssd path between two commas is empty; name a directory or drop a comma"
        )
    if len(paths) > MAX_DISKS:
        raise ConfigError(f"the ssd tier takes up to {MAX_DISKS} disks, not {len(paths)}")
    real = [Path(os.path.realpath(path)) for path in paths]  # circles of links do not raise
    for number, path in enumerate(real):
        for other in real[number + 1 :]:
            if path == other:
                raise ConfigError(
                    f"the ssd tier is given {paths[number]} twice; name each disk once"
                )
            if path.is_relative_to(other) or other.is_relative_to(path):
                raise ConfigError(
                    f"of the ssd tier's directories one lies in the other: {path} and {other}; "
                    "give each a place of its own"
                )


# The default of a cache server, whose SSD tier takes every block that the slab evicts.
SERVER_SSD = SsdSettings(admission="all")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """The files of a client's credentials: token, certificate and trusted authorities."""

    THEM: ClassVar[str]  # the name of the servers in help texts

    token_file: Path | None = setting(None, readers.path, "file with the token for {them}", "FILE")
    ca_file: Path | None = setting(
        None, readers.path, "who signed the certificates of {them}, as PEM", "FILE",
        "the system's authorities",
    )  # fmt: skip
    cert_file: Path | None = setting(
        None, readers.path, "this engine's certificate for {them}, as PEM", "FILE"
    )
    key_file: Path | None = setting(
        None, readers.path, "the key of that certificate, as PEM", "FILE"
    )
    server_name: str | None = setting(
        None, readers.text, "what the certificates of {them} say", "NAME",
        "the host in the address",
    )  # fmt: skip

    def credentials(self) -> Credentials:
        """Return the credentials. Raises TierConfigError for a certificate or key alone."""
        return Credentials(**{each.name: getattr(self, each.name) for each in fields(Credentials)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings(ClientSettings):
    """The credential files for reading other engines' slabs."""

    THEM: ClassVar[str] = "other engines"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTierSettings(ClientSettings):
    """The credential files for cache servers, the tag key, and the look-up timeout."""

    THEM: ClassVar[str] = "cache servers"

    tag_key_file: Path | None = setting(
        None, readers.path,
        "file with the key of the tags of blocks on cache servers, which no server then can forge",
        "FILE",
    )  # fmt: skip
    lookup_seconds: float = setting(
        LOOKUP_SECONDS, readers.seconds_up_to(MAX_LOOKUP_SECONDS),
        "how long a request waits for cache servers to say what they have of its prompt", "N",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The settings for other engines' access to this engine's slab, if the slab is served."""

    token_file: Path | None = setting(
        None, readers.path, "file of the token that other engines send", "FILE",
        "on loopback one that engines of this user find by themselves",
    )  # fmt: skip
    tls_cert: Path | None = setting(
        None, readers.path, "PEM file of the certificate shown to other engines", "FILE"
    )
    tls_key: Path | None = setting(None, readers.path, "PEM file of its key", "FILE")
    tls_client_ca: Path | None = setting(
        None, readers.path, "ask other engines for certificates of this CA", "FILE"
    )
    insecure: bool = setting(False, readers.switch, "let every connecting client read the cpu tier")


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """The address to listen on. Port 0 means any free port."""

    host: str  # an IPv6 address has no brackets here
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """The settings of the slab and all stores below it. The settings of engines and adapters
    inherit from this class and declare the options for its fields. `ssd.path` adds an SSD tier."""

    cpu: CpuSettings = field(default_factory=CpuSettings)
    ssd: SsdSettings = field(default_factory=SsdSettings)
    remote: RemoteTierSettings = field(default_factory=RemoteTierSettings)
    cache_servers: tuple[ServerAddress, ...] = ()  # the servers of the lowest tier
    peer_addresses: tuple[ServerAddress, ...] = ()  # the engines of one tier
    peer: PeerSettings = field(default_factory=PeerSettings)
    listen_address: ListenAddress | None = None  # for other engines
    serve: ServeSettings = field(default_factory=ServeSettings)
    other_tiers: tuple[str, ...] = ()  # names of tiers of other packages
    tier_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # tier → options
    require_tiers: bool = False  # whether the start fails while a store is down
    load: str = "auto"  # see connector/costs/economics.py
    faults: str = ""  # see tiers/testing/fault_plan.py
    watermark: float = WATERMARK  # share of free slots below which write-back starts
    read_seconds: float = READ_SECONDS  # the longest time of a load's read
    keeps_unwritten: bool = False  # whether unwritten blocks are never evicted

    @property
    def has_ssd(self) -> bool:
        return self.ssd.path is not None

    @property
    def store_names(self) -> tuple[str, ...]:
        """The names of the tiers below the slab, in metrics and drills, the fastest first."""
        return (
            *("ssd",) * self.has_ssd,
            *self.other_tiers,
            *(PEER,) * bool(self.peer_addresses),
            *(REMOTE,) * bool(self.cache_servers),
        )

    @property
    def drill(self) -> Drill | None:
        """Return the faults to inject, or None without `faults`. Raises TierConfigError."""
        if not self.faults:
            return None
        from .testing.faulty_store import parse_drill  # imported only for a drill

        return parse_drill(self.faults, self.store_names)
