# SPDX-License-Identifier: Apache-2.0
"""What compose.yaml and the Kubernetes manifests say of each program, in one form."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from stratakv.engine.cli import route
from stratakv.engine.cli.args import Parser, engine_options_of
from stratakv.engine.cli.main import import_command
from stratakv.engine.config.cache_server_options import read_options
from stratakv.engine.config.engine_config import EngineConfig
from stratakv.engine.config.engine_options import engine_config

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
WORKLOADS = ("StatefulSet", "Deployment")
# Models that are not here; the embedded one stands for them.
MODELS = ("/model", "MODEL")


@dataclass(frozen=True, slots=True)
class Workload:
    """One program of the manifests: its workload, its pod and its container."""

    name: str
    whole: Mapping[str, Any]

    @property
    def pod(self) -> Mapping[str, Any]:
        pod: Mapping[str, Any] = self.whole["spec"]["template"]["spec"]
        return pod

    @property
    def labels(self) -> Mapping[str, str]:
        labels: Mapping[str, str] = self.whole["spec"]["template"]["metadata"]["labels"]
        return labels

    @property
    def container(self) -> Mapping[str, Any]:
        (container,) = self.pod["containers"]
        return dict(container)

    @property
    def environment(self) -> dict[str, str]:
        """Secrets are something of the right length."""
        return {each["name"]: each.get("value", "x" * 64) for each in self.container.get("env", ())}

    @property
    def hosts(self) -> list[str]:
        """The names of its pods that others use."""
        service = self.whole["spec"]["serviceName"]
        return [
            f"{self.name}-{number}.{service}.stratakv.svc"
            for number in range(self.whole["spec"]["replicas"])
        ]


@cache
def manifests() -> list[dict[str, Any]]:
    """Every object, in the order of the files."""
    paths = [path for path in sorted(KUBERNETES.glob("*.yaml")) if path.stem != "kustomization"]
    return [each for path in paths for each in yaml.safe_load_all(path.read_text())]


@cache
def workloads() -> dict[str, Workload]:
    found = [each for each in manifests() if each["kind"] in WORKLOADS]
    return {each["metadata"]["name"]: Workload(each["metadata"]["name"], each) for each in found}


@cache
def compose(name: str = "compose.yaml") -> dict[str, Any]:
    whole: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return whole


def parse(words: Sequence[str], environment: Mapping[str, str] | None = None) -> Any:
    """What the program would make of this command line: the settings of the engine or the router,
    the options of the cache server, else the arguments. Raises ConfigError."""
    command, *rest = words
    module = import_command(command)
    parser = Parser(prog=f"stratakv {command}")
    module.add_arguments(parser)
    ours = {name: text for name, text in os.environ.items() if not name.startswith("STRATAKV_")}
    with mock.patch.dict(os.environ, ours | dict(environment or {}), clear=True):
        args = parser.parse_all(rest)
        if command == "serve":
            assert args.model in (None, *MODELS)
            return engine_config(None, engine_options_of(args))
        if command == "route":
            return route.router_config(args)
        if command == "cache-server":
            return read_options(vars(args), os.environ)
        return args


def settings_of(workload: Workload) -> Any:
    return parse(workload.container["args"], workload.environment)


def nodes() -> Iterator[tuple[Workload, EngineConfig]]:
    for workload in workloads().values():
        if workload.container["args"][0] == "serve":
            yield workload, settings_of(workload)


def size(text: str) -> int:
    """Bytes in a quantity of Kubernetes or Compose."""
    for unit, factor in {"Gi": 2**30, "Mi": 2**20, "G": 2**30, "M": 2**20}.items():
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * factor
    return int(text)
