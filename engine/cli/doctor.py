# SPDX-License-Identifier: Apache-2.0
"""`stratakv doctor vllm`: what will not work with our tiers below another engine, before it is
started.

One line for each thing that was looked at. Starts no engine and changes nothing. Exit codes: 0 no
problem, 1 at least one, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...tiers.settings import readers
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import ConfigError
from . import config
from .args import Parser
from .checks.base import Finding, Level, run_checks

DESCRIPTION = "Say what will not work with our tiers below another engine, before it is started."

EXIT_PROBLEMS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine; the rest belongs to it."""
    parser.add_argument("host", metavar="|".join(_HOSTS), nargs="?", help="which engine")
    parser.add_argument(
        "rest", metavar="...", nargs=argparse.REMAINDER, help="see stratakv doctor vllm --help"
    )


def run(args: argparse.Namespace) -> int:
    """Look, show, and say by the exit code whether anything will not work."""
    if args.host not in _HOSTS:
        near = did_you_mean(args.host or "", _HOSTS)
        given = "" if args.host is None else f", not {args.host!r}{near}"
        raise ConfigError(f"stratakv doctor takes {', '.join(_HOSTS)}{given}")
    return _HOSTS[args.host](args.rest)


def add_vllm_arguments(parser: argparse.ArgumentParser) -> None:
    """What vLLM is to be given, in one of two ways, and what it is started with beside that."""
    parser.add_argument(
        "--config", metavar="FILE|JSON", help="what --kv-transfer-config is to be given"
    )
    config.add_vllm_arguments(parser.add_argument_group("instead of --config"))
    other = parser.add_argument_group("vLLM")
    other.add_argument(
        "--python", metavar="PYTHON", help="of vLLM's environment (default: this one)"
    )
    other.add_argument(
        "--model", dest="its_model", metavar="MODEL", help="a model directory, or a name"
    )
    other.add_argument(
        "--prefix-caching-hash-algo", metavar="NAME", default="sha256",
        help="as vLLM is given it (default: sha256)",
    )  # fmt: skip
    other.add_argument(
        "--kv-cache-dtype", metavar="NAME", default="auto",
        help="as vLLM is given it (default: auto)",
    )  # fmt: skip
    other.add_argument("--block-size", metavar="N", help="as vLLM is given it")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _vllm(words: list[str]) -> int:
    # Here, since what they import is of no use to `add_arguments`.
    from .checks import python, vllm

    parser = Parser(
        prog="stratakv doctor vllm",
        description="Say what will not work with our tiers below vLLM, before it is started.",
    )
    add_vllm_arguments(parser)
    args = vars(parser.parse_all(words))
    transfer = _transfer_of(args)
    environment = python.this_environment()
    interpreter = python.this_python() if args["python"] is None else args["python"]
    algorithm = args["prefix_caching_hash_algo"]
    size = args["block_size"]
    block_size = None if size is None else readers.integer_within(1, 2**20)("--block-size", size)
    try:
        facts: Any = python.ask_python(interpreter, algorithm, environment)
    except python.NoFacts as error:
        facts = str(error)
    case = vllm.VllmCase(
        transfer=transfer,
        python=interpreter,
        facts=facts,
        environment=environment,
        model=args["its_model"],
        hash_algorithm=algorithm,
        kv_cache_dtype=args["kv_cache_dtype"],
        block_size=block_size,
    )
    return _tell("vllm", run_checks(vllm.CHECKS, case), as_json=args["json"])


def _transfer_of(args: Mapping[str, Any]) -> Mapping[str, Any]:
    from .checks.vllm import read_transfer

    flags = config.given_vllm_flags(args)
    if args["config"] is None:
        return config.transfer_config_of(args)
    if flags:
        raise ConfigError(f"{', '.join(flags)} and --config say the same; give one of the two")
    return read_transfer(args["config"])


def _tell(host: str, findings: Sequence[Finding], *, as_json: bool) -> int:
    counts = Counter(each.level for each in findings)
    problems = counts[Level.PROBLEM]
    if as_json:
        rows = [each._asdict() for each in findings]
        levels = {"problems": problems, "warnings": counts[Level.WARNING]}
        print(json.dumps({"host": host, **levels, "findings": rows}, indent=2))
    else:
        for each in findings:
            print(each.line())
        print(f"{problems} problems, {counts[Level.WARNING]} warnings")
    return EXIT_PROBLEMS if problems else 0


# Another engine is a list of checks in `checks/`, and a word here.
_HOSTS: Mapping[str, Callable[[list[str]], int]] = {"vllm": _vllm}
