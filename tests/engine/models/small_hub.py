# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face Hub on the loopback: the few routes that fetching a model takes.

Holds repositories of named files, tells what was asked for, and can hold back the end of a file.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

_INFO = re.compile(r"/api/models/([^/]+/[^/]+)/revision/([^/?]+)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """Files by revision. `listed` are names that it claims to have beside them."""

    revisions: dict[str, dict[str, bytes]]
    listed: tuple[str, ...] = ()
    token: str = ""  # needed to see it at all
    is_gated: bool = False  # its list may be read by all, its files by none

    def commit_of(self, revision: str) -> str | None:
        """40 digits that its files decide; a commit is its own."""
        commits = self._commits
        return revision if revision in commits.values() else commits.get(revision)

    def files(self, revision: str) -> Mapping[str, bytes]:
        """Of a revision or a commit that is there."""
        commit = self.commit_of(revision)
        return next(
            self.revisions[name] for name in self.revisions if self.commit_of(name) == commit
        )

    @cached_property
    def _commits(self) -> dict[str, str]:
        return {
            name: hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
            for name, files in self.revisions.items()
        }


@dataclass
class SmallHub:
    """`asked` has every file that was sent, by name and in order."""

    repositories: dict[str, Repository]
    asked: list[str] = field(default_factory=list)
    requests: int = 0
    held_back: str = ""  # of this file only half is sent, and then nothing
    half_sent: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)
    endpoint: str = ""


@contextmanager
def serving(hub: SmallHub) -> Iterator[SmallHub]:
    """The hub at `endpoint`, while this lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, with_body: bool) -> None:
            hub.requests += 1
            info, file = _INFO.match(self.path), _FILE.match(self.path)
            found = info or file
            repository = hub.repositories.get(found[1]) if found else None
            given = self.headers.get("Authorization", "")
            if found is None or repository is None:
                return self._refuse(401, "RepoNotFound")
            if repository.token and given != f"Bearer {repository.token}":
                if given:
                    return self._refuse(403, "")
                return self._refuse(401, "RepoNotFound")
            revision = unquote(found[2])
            commit = repository.commit_of(revision)
            if commit is None:
                return self._refuse(404, "RevisionNotFound")
            files = repository.files(revision)
            if info is not None:
                names = [*files, *repository.listed]
                body = {
                    "id": found[1],
                    "sha": commit,
                    "siblings": [{"rfilename": n} for n in names],
                }
                return self._send(json.dumps(body).encode(), {}, with_body=with_body)
            if repository.is_gated:
                return self._refuse(403, "GatedRepo")
            name = unquote(found[3])
            if name not in files:
                return self._refuse(404, "EntryNotFound")
            if with_body:
                hub.asked.append(name)
            etag = hashlib.sha256(files[name]).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
            return self._send(
                files[name], headers, with_body=with_body, is_held=name == hub.held_back
            )

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _send(
            self, body: bytes, headers: dict[str, str], *, with_body: bool, is_held: bool = False
        ) -> None:
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body and is_held:
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                hub.half_sent.set()
                hub.may_end.wait(60)
                self.close_connection = True
            elif with_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, name="small-hub", daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.may_end.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
