# SPDX-License-Identifier: Apache-2.0
"""Pages of the documentation, done as a reader does them: with the real command line and Python.

    reader = Reader(folder)
    for block in blocks("docs/tutorials/x.md"):
        reader.do(block)

What stands in a page is what is run; `Reader(substitutes=...)` and `NOT_RUN` are all that differs.

- `sh`: each command in bash. `stratakv serve`, `route` and `cache-server` run on in the background
  once they are ready, until another server is started on their port, or until `stop`.
- `python`, `toml`, `json`: a first line `# path/of/a.file`, or the name behind the language, makes
  it a file in the reader's folder. Other Python is run.
- `text`: what the last block has said. Its lines must be there in this order; `...` stands for
  anything. Where a command only looks at something, a reader looks again for a few seconds.
- `keys`: Ctrl-C in the servers' terminals ends them.
- Blocks of other kinds are left alone; `test_docs_pages.py` has the list of them.

Servers and Python programs come from the nursery, where torch is imported already.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .free_ports import free_ports
from .nursery_site.nursery_client import popen

ROOT = Path(__file__).resolve().parent.parent
# Where pages lie.
FOLDERS = (
    ".", "docs", "docs/commands", "docs/notes", "docs/tutorials", "deploy", "tests/regressions"
)  # fmt: skip
# The pages of every command, flag and route.
COMMAND_PAGES = (
    "docs/commands.md",
    *(f"docs/commands/{path.name}" for path in sorted((ROOT / "docs" / "commands").glob("*.md"))),
)
BIN = Path(sys.executable).parent
# Of what hangs. Nothing is waited for longer than it takes; a busy machine may take minutes.
START_SECONDS, COMMAND_SECONDS = 240.0, 240.0
LOOK_SECONDS = 20.0

_INSTALLED = "tests/test_wheel.py and tests/test_package.py install it"
_NO_CONTAINERS = "there is no container engine here; tests/test_deploy.py reads the file"
_NO_CLUSTER = "there is no cluster; tests/test_deploy_manifests.py checks what is applied"
_HOST = "changes this machine"
_GPU = "needs a GPU; tests/test_on_gpu_tool.py rehearses all of them and reads these lines"
_BY_HAND = "takes 3.5 GB of packages; run by hand"
# Beginnings of commands that are not run, and why. `test_docs_pages.py` sees that each is there.
NOT_RUN = {
    "pip install .  ": "into an environment of another engine's; " + _INSTALLED,
    "pip install numpy .": _INSTALLED,
    "/opt/stratakv/bin/pip install -c constraints.txt '.[engine]'": _INSTALLED,
    "pip download": "needs a network; `pytest --net tests/test_docs_pages.py` runs it",
    "python tools/on_gpu.py": _GPU,
    "lmcache server": "not installed; tests/connector/lmcache runs the adapter below a small host",
    "python -m sglang.launch_server": "not installed; tests/connector/sglang does the same",
    "vllm serve": "not installed; `make test-vllm` does it, tests/connector/vllm the rest",
    "stratakv doctor vllm": "needs a Python with vLLM; tests/engine/cli/test_doctor.py makes one",
    "python3 -m venv /tmp/vllm": _BY_HAND,
    "/tmp/vllm/bin/pip": _BY_HAND,
    "make test-vllm": _BY_HAND,
    "stratakv cache-server --host CACHE": "needs four hosts; test_deploy_manifests.py parses it",
    "stratakv serve MODEL --host": "needs four hosts; test_deploy_manifests.py parses it",
    "stratakv route --prefill http://P": "needs four hosts; test_deploy_manifests.py parses it",
    "grpc_health_probe": "not installed; cache_server/test_security_matrix.py asks the same",
    "deploy/two-engines.sh": "tests/test_two_engines_script.py runs it and compares the page",
    "deploy/cluster.sh": "tests/test_cluster_script.py runs it and compares the page",
    "docker": _NO_CONTAINERS,
    "MODEL=/srv/models/x docker": _NO_CONTAINERS,
    "podman": _NO_CONTAINERS,
    "chown": _HOST,
    "kubectl apply": _NO_CLUSTER,
    "useradd": _HOST,
    "python3 -m venv /opt/stratakv": _HOST,
    "systemctl": _HOST + "; tests/test_deploy.py has systemd read the units",
}
# A package that a page has made is installed for its reader alone, without a network.
INSTALL = "python -m pip install --quiet --no-deps --no-build-isolation --target {site} "
# Beginnings of commands that change nothing.
LOOKS = ("stratakv describe", "stratakv cache ls", "curl -s localhost:8000/metrics")
# The servers that run on in the background → the port of each where none is named.
SERVERS = {"serve": 8000, "route": 8100, "cache-server": 9400}
# Runs of ports in the pages: a server's data port is the one after its own.
PORTS = (8000, 8001, 8002, 8100, 9400, 9401, 9402, 9405, 9500, 9501)
# A failed request must fail the page.
PRELUDE = "curl() { command curl --fail-with-body \"$@\"; }\nset -euo pipefail\n"  # fmt: skip


def read_command_pages() -> str:
    """The text of all pages of commands, one behind the other."""
    return "\n".join((ROOT / page).read_text() for page in COMMAND_PAGES)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    language: str
    text: str
    place: str = field(compare=False)  # page and line, for messages
    name: str = ""  # behind the language

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block; lines that a backslash or a quote continues are one."""
        commands: list[str] = []
        begun = ""
        for line in self.text.replace("\\\n", " ").splitlines():
            begun += line
            try:
                words = shlex.split(begun, comments=True)
            except ValueError:  # an open quote
                begun += "\n"
                continue
            if words:
                commands.append(begun)
            begun = ""
        assert not begun, f"{self.place}: an open quote"
        return commands

    @property
    def file_name(self) -> str | None:
        """The file that the block is: a name behind the language, or in a comment that is its first
        line."""
        named = re.match(r"# ([\w./-]+\.(?:py|toml))\n", self.text)
        return self.name or (named[1] if named else None)


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order. `page` is a path from the root."""
    text = (ROOT / page).read_text()
    fence = r"^```(\w*)(?: ([\w./-]+))?\n(.*?)^```$"
    for found in re.finditer(fence, text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(found[1], found[3], f"{page}:{line}", found[2] or "")


class Reader:
    """Somebody with an empty home who does what a page says, in order."""

    def __init__(self, home: Path, substitutes: Sequence[tuple[str, str]] = ()) -> None:
        self.home = home
        self.said = ""  # by the last block, or the last command
        self._ports = _free_ports()
        self._substitutes = list(substitutes)
        self._last_commands: list[str] = []
        self._site = home / "site-packages"
        self._environment = os.environ | {
            "HOME": str(home),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(self._site), os.environ.get("PYTHONPATH", "")]),
            "PYTHONUNBUFFERED": "1",
        }
        for name in ("XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
            self._environment.pop(name, None)
        self._running: dict[int, Any] = {}  # by port

    def do(self, block: Block) -> None:
        """One block: run it, write it, or compare it."""
        try:
            if block.language == "text":
                self._look_until(block.text)
            elif block.file_name is not None:
                path = self.home / block.file_name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(self._adapted(block.text))
            elif block.language == "python":
                self.python(block.text)
            elif block.language == "keys":
                assert block.text == "Ctrl-C\n", "a key that nobody presses"
                self.stop()
            elif block.language == "sh":
                self._run_all(block.commands)
                self._last_commands = block.commands
        except AssertionError as error:
            raise AssertionError(f"{block.place}: {error}") from error

    def python(self, text: str) -> str:
        """A program of its own; what it said on standard output."""
        self._last_commands = ["python"]
        files = [self.home / name for name in ("program.py", "program.out", "program.err")]
        files[0].write_text(self._adapted(text))
        words = [sys.executable, "-m", "tests.page_program", str(files[0])]
        program = self._popen(words, files[1], files[2])
        try:
            code = program.wait(COMMAND_SECONDS)
        finally:
            program.kill()
        said = files[1].read_text()
        self.said = said + files[2].read_text()
        assert code == 0, f"{text}\nended with {code}:\n{self.said}"
        return said

    def substitute(self, old: str, new: str) -> None:
        """From now on `new` stands where the page has `old`."""
        self._substitutes.append((old, new))

    def shell(self, command: str) -> str:
        """One command; what it said. A server has said what is in its log when it is ready."""
        words = shlex.split(self._adapted(command), comments=True)
        if not words or command.startswith(tuple(NOT_RUN)):
            return ""
        given = {}
        while re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            given[name] = value
        if words[0] == "stratakv" and words[1] in SERVERS and "--new-token" not in words:
            return self._serve(words, given)
        folder = ROOT if words[0] == "make" else self.home
        return self._run(["bash", "-c", PRELUDE + self._adapted(command)], folder)

    def serves(self, port: int) -> bool:
        """Whether a server runs on this port of the pages."""
        return self._ports[port] in self._running

    def stop(self) -> None:
        """End every server, the last one first."""
        for port in reversed(list(self._running)):
            self._end(port)

    def _adapted(self, text: str) -> str:
        """With other ports than those of the page, which may be taken, and the substitutes."""
        for old, new in self._substitutes:
            text = text.replace(old, new)
        for old, new in self._ports.items():
            text = re.sub(rf"\b{old}\b", str(new), text)
        text = text.replace("{home}", str(self.home))
        return re.sub("^pip install ", INSTALL.format(site=self._site), text)

    def _run(self, words: list[str], folder: Path | None = None) -> str:
        done = subprocess.run(
            words, cwd=folder or self.home, env=self._environment, capture_output=True, text=True,
            timeout=COMMAND_SECONDS, check=False,
        )  # fmt: skip
        self.said = done.stdout + done.stderr
        assert done.returncode == 0, f"{words[-1]}\nended with {done.returncode}:\n{self.said}"
        return done.stdout

    def _popen(
        self, words: Sequence[str], out: Path, errors: Path, given: Mapping[str, str] | None = None
    ) -> Any:
        environment = self._environment | dict(given or {})
        if "PYTHONPATH" in (given or {}):  # also what is always there
            places = [str((self.home / given["PYTHONPATH"]).resolve())]
            environment["PYTHONPATH"] = os.pathsep.join([*places, self._environment["PYTHONPATH"]])
        for path in {out, errors}:
            path.unlink(missing_ok=True)
        with out.open("ab") as said, errors.open("ab") as wrong:
            return popen(
                words, stdout=said.fileno(), stderr=wrong.fileno(), env=environment, cwd=self.home
            )

    def _serve(self, words: list[str], given: Mapping[str, str]) -> str:
        kind = words[1]
        port = int(words[words.index("--port") + 1]) if "--port" in words else 0
        if not port:
            port = self._ports[SERVERS[kind]]
            words = [*words, "--port", str(port)]
        self._end(port)
        log = self.home / f"{kind}-{port}.log"
        arguments = [re.sub("^~", str(self.home), word) for word in words[1:]]
        program = [sys.executable, "-m", "stratakv.engine.cli.main", *arguments]
        server = self._popen(program, log, log, given)
        self._running[port] = server
        deadline = time.monotonic() + START_SECONDS
        while not _is_ready(kind, port, log):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        self.said = log.read_text()
        return self.said

    def _end(self, port: int) -> None:
        server = self._running.pop(port, None)
        if server is None:
            return
        server.send_signal(signal.SIGINT)
        try:
            assert server.wait(COMMAND_SECONDS) == 0
        finally:
            server.kill()
            server.wait()

    def _run_all(self, commands: Sequence[str]) -> None:
        if any(command.startswith("cd ") for command in commands):  # one shell for all of them
            kept = [command for command in commands if not command.startswith(tuple(NOT_RUN))]
            self._run(["bash", "-c", PRELUDE + self._adapted("\n".join(kept))])
            return
        said = ""
        for command in commands:
            self.shell(command)
            said += self.said
        self.said = said

    def _look_until(self, text: str) -> None:
        deadline = time.monotonic() + LOOK_SECONDS
        while True:
            try:
                return self._compare(text)
            except AssertionError:
                looks = all(each.startswith(LOOKS) for each in self._last_commands)
                if not looks or time.monotonic() > deadline:
                    raise
            time.sleep(0.1)
            self._run_all(self._last_commands)

    def _compare(self, text: str) -> None:
        said = iter(self.said.splitlines())
        for line in self._adapted(text).splitlines():
            wanted = ".*".join(re.escape(part) for part in line.split("..."))
            found = any(re.fullmatch(wanted, each.rstrip()) for each in said)
            assert found, f"nobody said {line!r}, or not in this place:\n{self.said}"


def find_block(page: str, start: str) -> Block:
    """The one block of a page that begins so."""
    [found] = [block for block in blocks(page) if block.text.startswith(start)]
    return found


def check_form(shown: str, said: str) -> None:
    """Every line that a page shows was said, in this order, but for its figures."""
    lines = iter(said.splitlines())
    for line in shown.splitlines():
        wanted = re.sub(r"\d[\d,.]*", "N", " ".join(line.split()))
        found = any(re.sub(r"\d[\d,.]*", "N", " ".join(each.split())) == wanted for each in lines)
        assert found, f"nobody said {line!r}, or not in this place:\n{said}"


def _is_ready(kind: str, port: int, log: Path) -> bool:
    if kind == "cache-server":
        return re.search(r":\d+", log.read_text()) is not None  # the addresses of its ready line
    # The last line before it listens, a moment later; clients of the pages try once.
    if f" at http://127.0.0.1:{port} " not in log.read_text():
        return False
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_ports() -> dict[int, int]:
    """The ports that pages name → free ones, neighbours as there."""
    return dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
