# SPDX-License-Identifier: Apache-2.0
"""`stratakv doctor`: finds problems of this machine before an engine starts. `stratakv doctor
vllm`: finds problems of StrataKV's tiers below another engine.

The command prints a line for each check, starts no engine and changes nothing. Exit codes: 0 no
problem, 1 at least one problem, 2 wrong usage."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...tiers.settings import readers
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import ConfigError
from . import config
from .args import Parser
from .checks.base import Finding, Level, run_checks

DESCRIPTION = "Say what will not work on this machine, or below another engine, before the start."

EXIT_PROBLEMS = 1
# Flags about this machine, which may stand before the name of another engine.
_HOST_FLAGS = (
    "--cpu-bytes", "--ssd-path", "--ssd-bytes", "--address", "--tls-cert", "--tls-key",
    "--tls-client-ca", "--device", "--port", "--cpu-huge-pages", "--json",
)  # fmt: skip
_DEVICE = re.compile(r"cpu|cuda(:[0-9]+)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags about this machine, and the name of another engine. The function for that
    engine parses the remaining arguments."""
    add_host_arguments(parser)
    parser.add_argument("host", metavar="|".join(_HOSTS), nargs="?", help="another engine")
    parser.add_argument(
        "rest", metavar="...", nargs=argparse.REMAINDER, help="see stratakv doctor vllm --help"
    )


def run(args: argparse.Namespace) -> int:
    if args.host is None:
        return _host(args)
    if args.host not in _HOSTS:
        near = did_you_mean(args.host or "", _HOSTS)
        raise ConfigError(
            f"stratakv doctor takes {', '.join(_HOSTS)} or flags alone, not {args.host!r}{near}"
        )
    given = [flag for flag in _HOST_FLAGS if getattr(args, flag[2:].replace("-", "_"))]
    if given:
        raise ConfigError(
            f"{given[0]} before {args.host} is about this machine; write it after {args.host}, or "
            f"leave {args.host} out"
        )
    return _HOSTS[args.host](args.rest)


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe the planned engine or cache server on this machine."""
    for flag, metavar, text in (
        ("--cpu-bytes", "SIZE", "of the cpu tier (default: 4GiB)"),
        ("--ssd-path", "PATH", "of the SSD tier"),
        ("--ssd-bytes", "SIZE", "of the SSD tier; with --ssd-path"),
        ("--host", "ADDRESS", "to listen on (default: 127.0.0.1)"),
        ("--tls-cert", "FILE", "PEM file of the certificate"),
        ("--tls-key", "FILE", "PEM file of its key"),
        ("--tls-client-ca", "FILE", "PEM file of the CA of clients"),
        ("--device", "DEVICE", "cpu, cuda or cuda:N (default: a GPU if there is one)"),
    ):
        dest = "address" if flag == "--host" else flag[2:].replace("-", "_")
        parser.add_argument(flag, dest=dest, metavar=metavar, help=text)
    parser.add_argument("--port", metavar="N", action="append", help="to listen on; repeatable")
    parser.add_argument(
        "--cpu-huge-pages", action="store_true", help="the cpu tier is to lie on huge pages"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _host(args: argparse.Namespace) -> int:
    from ...tiers.cache_server.access.tls import TlsFiles
    from ...tiers.tier_settings import CpuSettings, SsdSettings
    from .checks import host

    def size(flag: str, text: str | None, default: int) -> int:
        return default if text is None else int(readers.size(flag, text))

    if (args.tls_cert is None) != (args.tls_key is None) or (
        args.tls_client_ca and not args.tls_cert
    ):
        raise ConfigError("--tls-cert and --tls-key go together, --tls-client-ca with both")
    if args.ssd_bytes is not None and args.ssd_path is None:
        raise ConfigError("--ssd-bytes is the size of an SSD tier; give --ssd-path too")
    ssd = tls = None
    if args.ssd_path is not None:
        path = readers.path("--ssd-path", args.ssd_path)
        ssd_bytes = size("--ssd-bytes", args.ssd_bytes, SsdSettings().capacity_bytes)
        ssd = SsdSettings(path=path, capacity_bytes=ssd_bytes)
    if args.tls_cert is not None:
        files = [
            None if name is None else readers.path(flag, name)
            for flag, name in (
                ("--tls-cert", args.tls_cert),
                ("--tls-key", args.tls_key),
                ("--tls-client-ca", args.tls_client_ca),
            )
        ]
        assert files[0] is not None and files[1] is not None
        tls = TlsFiles(files[0], files[1], files[2])
    device = args.device or ""
    if device and not _DEVICE.fullmatch(device):
        raise ConfigError(f"--device takes cpu, cuda or one GPU as cuda:1, not {device!r}")
    case = host.HostCase(
        cpu_bytes=size("--cpu-bytes", args.cpu_bytes, CpuSettings().capacity_bytes),
        huge_pages=args.cpu_huge_pages,
        ssd=ssd,
        host=args.address or "127.0.0.1",
        ports=tuple(readers.integer_within(1, 65535)("--port", each) for each in args.port or ()),
        tls=tls,
        device=device,
    )
    return _tell("this machine", run_checks(host.CHECKS, case), as_json=args.json)


def add_vllm_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for vLLM's transfer configuration (whole, or by setting) and vLLM's start."""
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
    # The imports stand in the function, because `add_arguments` does not need these modules.
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
    is_slow = False
    try:
        facts: Any = python.ask_python(interpreter, algorithm, environment)
    except python.NoFacts as error:
        facts, is_slow = str(error), isinstance(error, python.TooSlow)
    case = vllm.VllmCase(
        transfer=transfer,
        python=interpreter,
        facts=facts,
        is_slow=is_slow,
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


# Other engines that `stratakv doctor` can check, each with the function that parses and checks.
_HOSTS: Mapping[str, Callable[[list[str]], int]] = {"vllm": _vllm}
