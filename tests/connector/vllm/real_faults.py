# SPDX-License-Identifier: Apache-2.0
"""What can go wrong in the tiers below a real vLLM: each fault with the moment of a request's life
at which it strikes, and the counters of which one has to show that it has.

    look-up   before the request comes
    load      when the tier is asked for the blocks that it has said it has
    store     when blocks that were computed are on their way to the tier

What is done within vLLM's process is a command of tier_faults.py; the rest happens here, to the
cache server, to the network before it and to the files of the SSD tier.
"""

from __future__ import annotations

import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.wire.rpc import Stub

from ...tiers.cache_server.rig import ServerProcess
from ...tiers.remote.fault_proxy import Damage, FaultProxy
from .vllm_engine import VllmEngine

LOOK_UP, LOAD, STORE = "look-up", "load", "store"
CALLS = {LOOK_UP: "lookup", LOAD: "load", STORE: "store"}
PAGE = 4096
TOLD_SECONDS = 60.0


@dataclass
class Below:
    """One engine, and what lies below its slab."""

    engine: VllmEngine
    server: ServerProcess
    proxies: list[FaultProxy]
    blocks: Path  # the slot file
    token: Path
    block_bytes: int  # a record of the slot file is a page and a block
    flags: tuple[str, ...] = ()

    def do(self, **command: Any) -> Any:
        """One command of tier_faults.py."""
        return self.engine.do(command)[command["fault"]]

    def restart(self, *flags: str) -> None:
        """A new server, with these flags beside the usual ones."""
        with suppress(ProcessLookupError, AssertionError):
            self.server.kill()
        self.server.flags = (*self.flags, *(flags or ("--insecure",)))
        self.server.start()


Act = Callable[[Below], None]


def nothing(below: Below) -> None:
    """Is done."""


@dataclass(frozen=True)
class Fault:
    """`begin` plants it and `end` lifts it. One counter whose name begins with one of `shows` has
    to rise."""

    tier: str
    moment: str
    what: str
    shows: tuple[str, ...]
    command: dict[str, Any] = field(default_factory=dict)
    begin: Act = nothing
    end: Act = nothing

    def __str__(self) -> str:
        return f"{self.tier}, {self.moment}: {self.what}"

    @contextmanager
    def planted(self, below: Below) -> Iterator[None]:
        """As long as this lasts. What is done here to the server or the network at a load or a
        store is done when the tier is asked for that."""
        with TellTale(below, self) if self._is_trap else self._begun(below):
            try:
                yield
            finally:
                below.do(fault="lift")
                self.end(below)

    @property
    def _is_trap(self) -> bool:
        return self.tier == "remote" and self.begin is not nothing and self.moment != LOOK_UP

    @contextmanager
    def _begun(self, below: Below) -> Iterator[None]:
        self.begin(below)
        if self.command:
            below.do(**self.command)
        yield


class TellTale:
    """Begins a fault when vLLM's process says that the call is being made."""

    def __init__(self, below: Below, fault: Fault) -> None:
        self._below = below
        self._fault = fault
        self._path = str(below.token.parent / "trap")
        self._listener = socket.socket(socket.AF_UNIX)
        Path(self._path).unlink(missing_ok=True)
        self._listener.bind(self._path)
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.error: BaseException | None = None

    def __enter__(self) -> TellTale:
        self._thread.start()
        call = CALLS[self._fault.moment]
        self._below.do(fault="trap", tier="remote", call=call, path=self._path)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(TOLD_SECONDS)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            line, _ = self._listener.accept()
        except OSError:
            return  # nobody came
        with line:
            try:
                line.recv(1)
                self._fault.begin(self._below)
                line.sendall(b"!")
            except BaseException as error:
                self.error = error


# The SSD tier: what its calls do


def drilled(tier: str, call: str, kind: str, value: str, what: str) -> Fault:
    """Of the product's own drill."""
    moment = {name: moment for moment, name in CALLS.items()}[call]
    plan = f"{call}:{kind}={value}"
    shows = (f"{tier}.errors.injected_{call}_{kind}",)
    return Fault(tier, moment, what, shows, {"fault": "drill", "tier": tier, "plan": plan})


def of_any_store(tier: str) -> list[Fault]:
    """What any store may do to whoever calls it."""
    return [
        drilled(tier, "lookup", "error", "1", "raises"),
        drilled(tier, "lookup", "miss", "1", "says that it has nothing"),
        drilled(tier, "lookup", "miss", "0.5", "says that it lacks every other block"),
        drilled(tier, "load", "error", "1", "fails"),
        drilled(tier, "load", "every", "2", "fails every other time"),
        drilled(tier, "load", "busy", "1", "finds a full queue"),
        drilled(tier, "load", "miss", "1", "brings nothing"),
        drilled(tier, "load", "miss", "0.3", "brings some blocks"),
        drilled(tier, "load", "partial", "1", "brings the leading blocks"),
        drilled(tier, "load", "delay", "0.2", "is slow, and in time"),
        drilled(tier, "load", "delay", "4", "comes after its deadline"),
        drilled(tier, "load", "hang", "1", "never ends"),
        drilled(tier, "load", "reorder", "1", "ends out of order"),
        drilled(tier, "store", "error", "1", "fails"),
        drilled(tier, "store", "busy", "1", "finds a full queue"),
        drilled(tier, "store", "miss", "0.5", "refuses some blocks"),
        drilled(tier, "store", "partial", "1", "keeps the leading blocks"),
        drilled(tier, "store", "delay", "0.5", "is slow"),
        drilled(tier, "store", "hang", "1", "never ends"),
    ]


def disk(moment: str, call: str, way: str, what: str) -> Fault:
    """Of a call to the operating system."""
    return Fault(
        "ssd", moment, what, ("planted.strikes",), {"fault": "disk", "call": call, "way": way}
    )


SYSTEM_CALLS = [
    disk(LOAD, "read", "EIO", "reads end with EIO"),
    disk(LOAD, "read", "ENODEV", "the device is gone"),
    disk(LOAD, "read", "ESTALE", "the file handle is stale"),
    disk(LOAD, "read", "ENOMEM", "reads lack memory"),
    disk(LOAD, "read", "EINVAL", "direct reads are refused"),
    disk(LOAD, "read", "short", "reads are short"),
    disk(LOAD, "read", "nothing", "reads bring nothing"),
    disk(LOAD, "read", "flipped", "a bit is flipped on the way"),
    disk(LOAD, "read", "zeroed", "zeros come"),
    disk(LOAD, "read", "header", "a header is damaged on the way"),
    disk(LOAD, "read", "slow", "reads are slow, and in time"),
    disk(LOAD, "read", "stuck", "reads hang in the kernel"),
    disk(STORE, "write", "EIO", "writes end with EIO"),
    disk(STORE, "write", "ENOSPC", "the disk is full"),
    disk(STORE, "write", "EDQUOT", "the quota is used up"),
    disk(STORE, "write", "EROFS", "the file system is read-only"),
    disk(STORE, "write", "short", "writes are short"),
    disk(STORE, "write", "slow", "writes are slow"),
    disk(STORE, "write", "stuck", "writes hang in the kernel"),
    disk(STORE, "fdatasync", "EIO", "a sync fails"),
    disk(STORE, "fdatasync", "stuck", "a sync hangs"),
    disk(STORE, "commit", "disk", "the index cannot be written"),
    disk(STORE, "commit", "full", "the index is full"),
    disk(STORE, "commit", "panic", "the index is in panic"),
    disk(STORE, "commit", "corrupted", "the index is damaged"),
]

# The SSD tier: what lies in its file


Change = Callable[[bytearray, int], None]  # of the file, whose records have so many bytes


def on_file(what: str, change: Change) -> Fault:
    """Its bytes change between a store and the load."""

    def begin(below: Below) -> None:
        content = bytearray(below.blocks.read_bytes())
        record = PAGE + below.block_bytes
        assert len(content) % record == 0
        change(content, record)
        with below.blocks.open("r+b") as file:
            file.write(content)

    return Fault("ssd", LOAD, what, ("ssd.rejected",), begin=begin)


def cut(what: str, share: float) -> Fault:
    """The file ends early."""
    whole = [0]

    def begin(below: Below) -> None:
        whole[0] = below.blocks.stat().st_size
        with below.blocks.open("r+b") as file:
            file.truncate(int(whole[0] * share))

    def end(below: Below) -> None:
        with below.blocks.open("r+b") as file:
            file.truncate(whole[0])

    return Fault("ssd", LOAD, what, ("ssd.rejected", "ssd.misses"), begin=begin, end=end)


def _flip(place: int) -> Change:
    """A byte of each record; places before 0 are counted from the end."""

    def change(content: bytearray, record: int) -> None:
        for each in range(place % record, len(content), record):
            content[each] ^= 1

    return change


def _zero_payloads(content: bytearray, record: int) -> None:
    for start in range(0, len(content), record):
        content[start + PAGE : start + record] = bytes(record - PAGE)


def _zero(content: bytearray, _record: int) -> None:
    content[:] = bytes(len(content))


def _noise(content: bytearray, _record: int) -> None:
    content[:] = random.Random(1).randbytes(len(content))


def _rotate(content: bytearray, record: int) -> None:
    content[:] = content[-record:] + content[:-record]


def _exchange_payloads(content: bytearray, record: int) -> None:
    """Each header is where it was, over the bytes of the record before."""
    payload = record - PAGE
    last = bytes(content[len(content) - payload :])
    for start in range(len(content) - record, 0, -record):
        content[start + PAGE : start + record] = content[start - payload : start]
    content[PAGE:record] = last


FILES = [
    on_file("a bit of each payload is flipped", _flip(PAGE + 1000)),
    on_file("the last byte of each payload is changed", _flip(-1)),
    on_file("a bit of each header is flipped", _flip(20)),
    on_file("payloads are zeroed", _zero_payloads),
    on_file("all is zeroed", _zero),
    on_file("all is noise", _noise),
    on_file("records lie one slot further", _rotate),
    on_file("payloads lie below the next header", _exchange_payloads),
    cut("the file is cut in a record", 0.0123),
    cut("the file is cut to nothing", 0.0),
]

# The slab


def slab(moment: str, what: str, shows: tuple[str, ...], **command: Any) -> Fault:
    """Of memory."""
    return Fault("cpu", moment, what, shows, command)


def changed_in_slab(tier: str) -> Fault:
    """After a block has come to the slab, and before it is written."""
    command = {"fault": "trap", "tier": tier, "call": "store", "way": "middle"}
    what = "bytes change in the slab before they are written"
    return Fault(tier, STORE, what, ("planted.strikes",), command)


SLAB = [
    *(
        slab(LOAD, what, ("cpu.damaged",), fault="slab_damage", way=way)
        for way, what in {
            "zeroed": "every slot is zeroed",
            "first": "the first byte of each slot changes",
            "middle": "a byte in the middle of each slot changes",
            "last": "the last byte of each slot changes",
            "halves": "the halves of each slot change places",
            "exchanged": "slots have each other's bytes",
        }.items()
    ),
    slab(STORE, "all slots are taken", ("cpu.dropped_stores",), fault="room", way="taken"),
    slab(STORE, "slots are refused", ("planted.strikes",), fault="room", way="refused"),
    slab(STORE, "half of the slots are refused", ("planted.strikes",), fault="room", way="half"),
    Fault(
        "ssd", LOAD, "the slab has no room for what is read",
        ("ssd.promotion_allocation_failures",), {"fault": "room", "way": "taken"},
    ),
    Fault(
        "ssd", LOAD, "the slab has room for half of what is read",
        ("planted.strikes",), {"fault": "room", "way": "half"},
    ),
    changed_in_slab("ssd"),
    changed_in_slab("remote"),
]  # fmt: skip

# Cache servers

LOST = ("remote.errors", "remote.misses", "remote.promotion_failures", "remote.cascade_failures",
        "remote.rejected")  # fmt: skip


def _each(act: Callable[[FaultProxy], None]) -> Act:
    def do(below: Below) -> None:
        for proxy in below.proxies:
            act(proxy)

    return do


def _light(proxy: FaultProxy) -> None:
    proxy.black_hole(False)
    proxy.reset()


def _damaging(kind: str) -> Callable[[FaultProxy], None]:
    def begin(proxy: FaultProxy) -> None:
        proxy.damage = Damage(random.Random(1), 4.0, (kind,))

    return begin


def _whole(proxy: FaultProxy) -> None:
    proxy.damage = None
    proxy.reset()


def _at_full_pace(proxy: FaultProxy) -> None:
    proxy.pace()
    proxy.reset()


RESET = "connections are reset"
NETWORK: dict[str, tuple[Act, Act]] = {
    RESET: (_each(FaultProxy.reset), nothing),
    "nothing gets through": (_each(lambda proxy: proxy.black_hole(True)), _each(_light)),
    "connections are half-open": (_each(FaultProxy.vanish), _each(FaultProxy.reset)),
    "a byte a second": (_each(lambda proxy: proxy.pace(1, 1.0)), _each(_at_full_pace)),
    "nobody listens": (_each(FaultProxy.leave), _each(lambda proxy: proxy.refuse(False))),
    "bits are flipped": (_each(_damaging("flip")), _each(_whole)),
    "pieces are lost": (_each(_damaging("drop")), _each(_whole)),
    "pieces come twice": (_each(_damaging("duplicate")), _each(_whole)),
}


def _end_server(number: int) -> Act:
    def act(below: Below) -> None:
        if number == signal.SIGKILL:
            below.server.kill()
        else:
            assert below.server.process is not None
            below.server.process.send_signal(number)

    return act


def _go_on(below: Below) -> None:
    below.server.go_on()


def _delete_all(below: Below) -> None:
    with below.server.channel() as channel:
        Stub(channel).delete(messages.DeleteRequest(all=True), timeout=TOLD_SECONDS)


def _another_token(below: Below) -> None:
    below.restart("--token-file", str(below.token))


def _another_layout(below: Below) -> None:
    below.restart()
    below.server.attach(below.server.stub())


def _restart(below: Below) -> None:
    below.restart()


SERVER: dict[str, tuple[Act, Act]] = {
    "killed": (_end_server(signal.SIGKILL), _restart),
    "told to end": (_end_server(signal.SIGTERM), _restart),
    "hangs": (_end_server(signal.SIGSTOP), _go_on),
}


def of_servers() -> Iterator[Fault]:
    """Of the server and of the network, at each moment."""
    for what, (begin, end) in (SERVER | NETWORK).items():
        # A client whose idle connection ends makes another one and counts nothing.
        shows = ("network.connections",) if what == RESET else LOST
        for moment in (LOOK_UP, LOAD, STORE):
            yield Fault("remote", moment, what, shows, begin=begin, end=end)
    yield Fault("remote", LOOK_UP, "started again, empty", LOST, begin=_restart)
    yield Fault("remote", LOAD, "another engine deletes the blocks", LOST, begin=_delete_all)
    yield Fault("remote", LOOK_UP, "refuses the token", LOST, begin=_another_token, end=_restart)
    yield Fault("remote", LOOK_UP, "has another layout", LOST, begin=_another_layout, end=_restart)


FAULTS = [
    *of_any_store("ssd"), *SYSTEM_CALLS, *FILES, *SLAB, *of_any_store("remote"), *of_servers()
]  # fmt: skip
