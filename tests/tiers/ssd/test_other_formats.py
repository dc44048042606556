# SPDX-License-Identifier: Apache-2.0
"""Stores that other versions have made: an upgrade, the way back, and the way there again.

`recorded/` has stores as the versions of their formats wrote them (`recorded/record.py` says how);
that of the present format must be read, so nobody changes the format without its number.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.folder import open_store as opening
from stratakv.tiers.ssd.folder import other_formats
from stratakv.tiers.ssd.folder.directory import StoreDirectory
from stratakv.tiers.ssd.folder.identity_note import read_note
from stratakv.tiers.ssd.folder.inventory import look_at, remove
from stratakv.tiers.ssd.index.index_file import FORMAT_VERSION
from stratakv.tiers.ssd.store_check import check_store

from ..blocks import make_buffers
from ..store_contract import SECONDS
from .recorded.record import CAPACITY, LAYOUT, NAMESPACE, payload_of, recorded_keys

FORMATS = sorted(
    int(each.name.removeprefix("format-").removesuffix(".tar.xz"))
    for each in (Path(__file__).parent / "recorded").glob("format-*.tar.xz")
)
KEYS = recorded_keys()
PAYLOADS = [payload_of(key) for key in KEYS]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


def unpack(number: int, path: Path) -> None:
    """The recorded store of a format, at `path`."""
    with tarfile.open(Path(__file__).parent / "recorded" / f"format-{number}.tar.xz") as file:
        file.extractall(path, filter="data")


@pytest.fixture
def open_as(monkeypatch: pytest.MonkeyPatch, path: Path) -> Iterator[Callable[..., SsdStore]]:
    """Open the store as the version of a format would, of whose rows nothing else is known."""
    stores: list[SsdStore] = []

    def open_it(number: int = FORMAT_VERSION) -> SsdStore:
        for store in stores:
            store.close(SECONDS)
        monkeypatch.setattr(opening, "FORMAT_VERSION", number)
        stores.append(SsdStore(path, LAYOUT, CAPACITY, namespace=NAMESPACE))
        return stores[-1]

    yield open_it
    for store in stores:
        store.close(SECONDS)


def put(store: SsdStore) -> None:
    buffers = make_buffers(len(KEYS), LAYOUT)
    for payload, buffer in zip(PAYLOADS, buffers, strict=True):
        buffer[: len(payload)] = payload
    store.store(KEYS, buffers).result(SECONDS)


def loaded(store: SsdStore) -> list[bytes | None]:
    """What is there of every block; fails for bytes that nobody stored."""
    buffers = make_buffers(len(KEYS), LAYOUT)
    proofs = store.load(KEYS, buffers).result(SECONDS)
    found = [
        None if proof is None else bytes(buffer[: LAYOUT.page_bytes])
        for proof, buffer in zip(proofs, buffers, strict=True)
    ]
    assert all(each in (None, right) for each, right in zip(found, PAYLOADS, strict=True))
    return found


NOTHING = [None] * len(KEYS)


def test_every_format_was_recorded() -> None:
    assert list(range(1, FORMAT_VERSION + 1)) == FORMATS, "record a store of the new format too"


@pytest.mark.parametrize("number", FORMATS)
def test_a_warm_store_of_an_earlier_version(
    open_as: Callable[..., SsdStore], path: Path, number: int
) -> None:
    """Hits or misses, never a refusal and never an error, and the tier is in use at once."""
    unpack(number, path)
    store = open_as()
    found = loaded(store)
    assert found == (PAYLOADS if number == FORMAT_VERSION else NOTHING)
    assert store.lookup(KEYS) == [Answer.HIT if each else Answer.MISS for each in found]
    put(store)
    assert loaded(store) == PAYLOADS
    assert loaded(open_as()) == PAYLOADS
    store = open_as()
    store.close(SECONDS)
    assert check_store(path).is_clean


def test_an_upgrade_the_way_back_and_there_again(
    open_as: Callable[..., SsdStore], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each version finds what it had, the newer one too, which this one only sets aside."""
    newer = FORMAT_VERSION + 1
    unpack(FORMAT_VERSION, path)
    store = open_as(newer)
    assert loaded(store) == NOTHING
    assert "starts empty" in caplog.messages[-1]
    put(store)
    for number in (FORMAT_VERSION, newer, FORMAT_VERSION):
        store = open_as(number)
        assert loaded(store) == PAYLOADS
        assert store.stats().errors == {"other_format": 1}
        assert "goes on with its store of that format" in caplog.messages[-1]
    store.close(SECONDS)
    assert [each.name for each in other_formats.kept(path)] == [f"format-{newer}"]
    result = check_store(path)
    assert result.is_clean and any("kept for the version that made it" in n for n in result.notes)
    assert look_at(path).allocated_bytes > 1.9 * CAPACITY / 2
    remove(path)
    assert not path.exists()


def test_what_is_kept_of_an_older_version_is_whole(
    open_as: Callable[..., SsdStore], path: Path, tmp_path: Path
) -> None:
    unpack(2, path)
    unpack(2, tmp_path / "as it was")
    open_as()
    for name in ("identity", "blocks", "index/data.mdb"):
        was = (tmp_path / "as it was" / name).read_bytes()
        assert (path / "format-2" / name).read_bytes() == was


@pytest.mark.parametrize("how", ["clear", "drop"])
def test_what_is_forgotten_does_not_come_back(open_as: Callable[..., SsdStore], how: str) -> None:
    put(open_as())
    store = open_as(FORMAT_VERSION + 1)
    if how == "clear":
        store.clear()
    else:
        put(store)
        assert store.drop(KEYS[:1]) == 1
    assert store.wait_forgotten(SECONDS)
    assert loaded(open_as()) == NOTHING


def test_the_tier_comes_before_what_is_kept(
    open_as: Callable[..., SsdStore],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a disk that has no room for both, the store of the other version goes."""
    unpack(2, path)
    real = StoreDirectory.check_free_space

    def short(directory: StoreDirectory, plan: object) -> None:
        if other_formats.kept(directory.path):
            raise opening.TierDown("no room")
        real(directory, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(StoreDirectory, "check_free_space", short)
    put(store := open_as())
    assert loaded(store) == PAYLOADS and not other_formats.kept(path)
    assert "format-2 as well, which is removed" in caplog.messages[-1]


def test_another_models_store_is_never_taken_for_it(
    open_as: Callable[..., SsdStore], path: Path
) -> None:
    """What was kept belongs to its namespace as before."""
    put(open_as())
    put(open_as(FORMAT_VERSION + 1))
    open_as(FORMAT_VERSION + 1).close(SECONDS)
    note = read_note(path / f"format-{FORMAT_VERSION}")
    assert note is not None
    wanted = note.identity._replace(namespace=b"another")
    for name in ("identity", "blocks", "index"):
        shutil.move(path / name, path.parent / name)
    assert not other_formats.bring_back(path, wanted)
    assert other_formats.bring_back(path, note.identity)


class Killed(Exception):
    pass


@pytest.mark.parametrize("is_back", [False, True])
def test_a_crash_between_any_two_moves(
    open_as: Callable[..., SsdStore],
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_back: bool,
) -> None:
    """From both stores nothing is lost, whichever was moved when the process ended, and whichever
    version is started after it: the one that was moving (not `is_back`), or the one before."""
    put(open_as())
    put(open_as(FORMAT_VERSION + 1))
    open_as(FORMAT_VERSION + 1).close(SECONDS)
    shutil.copytree(path, tmp_path / "both")
    real, left = Path.rename, [0]

    def rename(self: Path, target: Path) -> Path:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return real(self, target)

    moves = 0
    while True:
        shutil.rmtree(path)
        shutil.copytree(tmp_path / "both", path)
        left[0] = moves
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", rename)
            try:
                open_as().close(SECONDS)
                ended = True
            except Killed:
                ended = False
        for version in (FORMAT_VERSION + is_back, FORMAT_VERSION + (not is_back)):
            assert loaded(open_as(version)) == PAYLOADS, f"version {version}, after {moves} moves"
        assert not list(path.glob("*.new")), f"after {moves} moves"
        if ended:
            break
        moves += 1
    assert moves >= 7, "three files there, three back, and the folder"


@pytest.mark.parametrize("name", ["format-2", "format-2.new"])
def test_a_link_is_not_followed(
    open_as: Callable[..., SsdStore], path: Path, tmp_path: Path, name: str
) -> None:
    unpack(2, path)
    (tmp_path / "elsewhere").mkdir()
    (path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TierConfigError, match=name):
        open_as()
    assert not list((tmp_path / "elsewhere").iterdir())
