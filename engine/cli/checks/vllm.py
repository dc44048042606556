# SPDX-License-Identifier: Apache-2.0
"""Checks of vLLM's `--kv-transfer-config`, and of the machine on which vLLM runs with StrataKV."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....connector.chunks.model_name import HostModel, name_model
from ....connector.vllm import region
from ....connector.vllm.identity import DTYPES, LAYOUTS, NAMESPACE
from ....connector.vllm.settings import (
    CONNECTOR,
    HOST,
    MODULE,
    OPTIONS,
    SECTION,
    SPEC,
    TIER,
    VllmSettings,
)
from ....tiers.settings.format import format_value
from ....tiers.settings.sizes import rough_size
from ....tiers.settings.values import ConfigError
from . import python as python_checks
from .base import Check, Finding, ok, problem, warning
from .disk import check_disks, check_ssd
from .machine import SHARED_MEMORY, check_clock, check_huge_pages, check_memory, check_shared_memory
from .python import PythonFacts, VllmModule
from .servers import check_servers

OFFLOADING = "OffloadingConnector"
STOCK_SPEC = "TieringOffloadingSpec"
ROLES = ("kv_both", "kv_producer", "kv_consumer")
ALIASES = ("NHD", "HND")  # vLLM's short names of KV cache layouts
CPU_LAYOUT, CPU_BLOCK_TOKENS = "LBHNC", 32
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# The kinds of layers in models' configurations that StrataConnector supports, and the kinds that
# were also tested with StrataSpec.
CONNECTOR_KINDS = (
    "full_attention", "attention", "sliding_attention", "chunked_attention", "linear_attention",
    "mamba",
)  # fmt: skip
SPEC_KINDS = ("full_attention", "sliding_attention", "linear_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmCase:
    """The planned start of vLLM. `transfer` is the value of `--kv-transfer-config`. `facts` is the
    result of the probe of vLLM's Python, or a text with the reason why the probe could not run."""

    transfer: Mapping[str, Any]
    python: str
    facts: PythonFacts | str
    environment: Mapping[str, str]
    model: str | None = None
    hash_algorithm: str = "sha256"
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    is_slow: bool = False  # the probe took too long, perhaps because the machine is busy
    shared_memory: Path = field(default=SHARED_MEMORY)

    @property
    def vllm(self) -> VllmModule:
        return VllmModule() if isinstance(self.facts, str) else self.facts.vllm

    @property
    def extra(self) -> Mapping[str, Any]:
        """The object under `kv_connector_extra_config`; {} if the configuration lacks it."""
        extra = self.transfer.get("kv_connector_extra_config")
        return extra if isinstance(extra, Mapping) else {}

    @property
    def is_connector(self) -> bool:
        """Whether the configuration names StrataConnector, which needs no region and no spec."""
        named = self.transfer.get("kv_connector"), self.transfer.get("kv_connector_module_path")
        return named == (CONNECTOR, MODULE)

    @property
    def is_whole(self) -> bool:
        """Whether the configuration names StrataSpec, not vLLM's own spec with a StrataKV tier."""
        return (self.extra.get("spec_name"), self.extra.get("spec_module_path")) == (SPEC, MODULE)

    @property
    def given(self) -> Mapping[str, Any] | None:
        """StrataKV's settings in the configuration; None for a configuration without StrataKV."""
        if self.is_connector or self.is_whole:
            given = self.extra.get(SECTION, {})
            return given if isinstance(given, Mapping) else None
        tiers = self.extra.get("secondary_tiers")
        for each in tiers if isinstance(tiers, Sequence) else ():
            if isinstance(each, Mapping) and each.get("type") == TIER:
                return {k: v for k, v in each.items() if k not in ("type", "module_path")}
        return None

    @property
    def settings(self) -> VllmSettings | None:
        """StrataKV's settings; None for invalid settings, which `check_settings` reports."""
        try:
            return None if self.given is None else HOST.read(self.given)
        except ConfigError:
            return None

    @property
    def region_bytes(self) -> int | None:
        size = self.extra.get("cpu_bytes_to_use")
        return int(size) if isinstance(size, int | float) and size > 0 else None


def read_transfer(text: str) -> Mapping[str, Any]:
    """Return the object in `text`, which is JSON or the path of a JSON file. Raises ConfigError."""
    source = "--config"
    if not text.lstrip().startswith("{"):
        source = f"--config {text}"
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{source} cannot be read ({reason}); give a file, or the JSON object itself"
            ) from error
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{source} is no JSON ({error}); give what stratakv config vllm prints"
        ) from error
    if not isinstance(given, dict):
        raise ConfigError(f"{source} takes a JSON object, not {format_value(given)}")
    return given


def check_python(case: VllmCase) -> Iterator[Finding]:
    yield from python_checks.check_interpreter(case.python, case.facts, is_slow=case.is_slow)
    if not isinstance(case.facts, str):
        yield from python_checks.check_vllm_version(case.facts.vllm, case.python)
        yield from python_checks.check_packages(case.facts, case.python)


def check_block_hash(case: VllmCase) -> Iterator[Finding]:
    """Check that every process of vLLM computes the same hash for a block."""
    if case.vllm.platform:
        yield from python_checks.check_hash_roots(case.vllm, case.hash_algorithm, case.environment)


def check_connector(case: VllmCase) -> Iterator[Finding]:
    """Check the fields of the transfer configuration around StrataKV's settings."""
    what, transfer = "config", case.transfer
    cure = "give what stratakv config vllm prints"
    if transfer.get("kv_connector") != OFFLOADING and not case.is_connector:
        named = format_value(transfer.get("kv_connector"))
        yield problem(
            what, f"kv_connector is {named}, and our tiers lie below {OFFLOADING}, or are "
            f"{CONNECTOR} with its kv_connector_module_path", cure,
        )  # fmt: skip
    if transfer.get("kv_role") not in ROLES:
        named = format_value(transfer.get("kv_role"))
        yield problem(what, f"kv_role is {named}, which vLLM refuses", 'give "kv_both"')
    if transfer.get("kv_load_failure_policy", "fail") != "recompute":
        yield warning(
            what, "kv_load_failure_policy is not recompute, so that a request fails whose load "
            "above our tiers does", 'give "kv_load_failure_policy": "recompute"',
        )  # fmt: skip
    else:
        yield ok(what, "what cannot be loaded is computed (kv_load_failure_policy)")
    misplaced = [name for name in case.extra if name in OPTIONS]
    if misplaced:
        yield problem(
            what, f"{', '.join(misplaced)} stand where vLLM does not look for them",
            f'put our settings under "{SECTION}"',
        )  # fmt: skip
    if not (case.is_connector or case.is_whole) and case.given is not None:
        name = case.extra.get("spec_name")
        if name != STOCK_SPEC:
            yield problem(
                what, f"spec_name is {format_value(name)}, which takes no secondary tiers",
                f'give "spec_name": "{STOCK_SPEC}", or our spec {SPEC}',
            )  # fmt: skip
        elif case.vllm.is_cpu_build:
            yield problem(
                what, f"{STOCK_SPEC} has no worker for the CPU build",
                f'give "spec_name": "{SPEC}", "spec_module_path": "{MODULE}"',
            )  # fmt: skip
    if case.extra.get("canonical_layout") and case.vllm.is_cpu_build:
        yield problem(what, "canonical_layout needs copies made on a GPU", "leave it out")


def check_settings(case: VllmCase) -> Iterator[Finding]:
    if case.given is None:
        yield problem(
            "settings", "our tiers are named nowhere in it", "give what stratakv config vllm prints"
        )
        return
    try:
        settings = HOST.read(case.given)
    except ConfigError as error:
        yield problem("settings", str(error), "mend that")
        return
    if settings.faults:
        yield warning("settings", "faults are injected on purpose", "leave out --faults")
    if not settings.store_names:
        yield warning(
            "settings", "there is nothing below the slab, so a restart begins with nothing",
            "give --ssd-path, or --servers",
        )  # fmt: skip
    else:
        slab, below = rough_size(settings.cpu.capacity_bytes), ", ".join(settings.store_names)
        yield ok("settings", f"slab {slab}, {below}")


def check_region(case: VllmCase) -> Iterator[Finding]:
    """Check the space for vLLM's region of shared memory, and the regions left by ended engines."""
    if case.is_connector:
        yield ok("region", f"{CONNECTOR} has none of vLLM's")
    elif case.region_bytes is None:
        size = format_value(case.extra.get("cpu_bytes_to_use"))
        yield problem(
            "region", f"cpu_bytes_to_use is {size}", "give a number of bytes, such as 8589934592"
        )
    else:
        yield from check_shared_memory(case.region_bytes, case.shared_memory)
    left = region.left_behind(case.shared_memory)
    if left:
        cure = (
            "the start will remove them"
            if case.is_whole
            else f"remove them; with {SPEC} the start would"
        )
        yield warning("regions", f"{_taken(left)} are left of engines that are gone", cure)
    others = region.unmarked(case.shared_memory)
    if others:
        yield warning(
            "regions", f"{_taken(others)} are of engines without our spec",
            f"where no vLLM runs, remove {case.shared_memory}/{region.PREFIX}*",
        )  # fmt: skip
    if not (left or others):
        yield ok("regions", "none is left behind")


def check_sizes(case: VllmCase) -> Iterator[Finding]:
    settings = case.settings
    if settings is not None:
        slab = settings.cpu.capacity_bytes
        yield from check_memory(slab, case.region_bytes or 0)
        if settings.cpu.huge_pages:
            yield from check_huge_pages(slab)


def check_disk(case: VllmCase) -> Iterator[Finding]:
    settings = case.settings
    if settings is not None and settings.ssd.path is not None:
        yield from check_disks(settings.ssd, lambda disk: check_ssd(disk, NAMESPACE, "vLLM"))


def check_remote(case: VllmCase) -> Iterator[Finding]:
    """Check the cache servers, and the clock if a server uses a certificate."""
    settings = case.settings
    if settings is not None and settings.cache_servers:
        yield from check_servers(settings)
        if any(server.tls for server in settings.cache_servers):
            yield from check_clock()


def check_allocator(case: VllmCase) -> Iterator[Finding]:
    """Check that PyTorch does not move memory that a KV connector uses."""
    named = [
        name
        for name in ALLOCATOR_VARIABLES
        if "expandable_segments:True" in case.environment.get(name, "")
    ]
    if not named:
        return
    fact = f"{named[0]} has expandable_segments:True"
    if ALLOCATOR_VARIABLES[0] in named:
        yield problem(
            "allocator", f"{fact}, which vLLM refuses beside any connector",
            "leave it out, or start vLLM with --enable-sleep-mode",
        )  # fmt: skip
    else:
        yield warning(
            "allocator", f"{fact}: memory that a connector was told of may move", "leave it out"
        )


def check_kv_cache(case: VllmCase) -> Iterator[Finding]:
    """Check the dtype and the layout of vLLM's KV cache, as far as known before vLLM's start."""
    dtype = case.kv_cache_dtype
    if dtype == "auto":
        yield ok("kv cache", f"dtype is the model's; of these: {', '.join(DTYPES)}")
    elif dtype not in DTYPES:
        yield problem(
            "kv cache", f"dtype {dtype} cannot be shared between engines, as far as StrataKV knows",
            f"use --kv-cache-dtype auto or one of {', '.join(DTYPES)}",
        )  # fmt: skip
    else:
        yield ok("kv cache", f"dtype {dtype}")
    layout = case.environment.get("VLLM_KV_CACHE_LAYOUT")
    if layout is not None:
        yield from _check_layout(layout, is_cpu_build=case.vllm.is_cpu_build)
    size = case.block_size
    if size is not None and case.vllm.is_cpu_build and size % CPU_BLOCK_TOKENS:
        yield warning(
            "kv cache", f"blocks of {size} tokens are nothing for the CPU build but with MLA",
            f"give --block-size a multiple of {CPU_BLOCK_TOKENS}",
        )  # fmt: skip
    per_chunk = case.extra.get("blocks_per_chunk", 1)
    if not isinstance(per_chunk, int) or isinstance(per_chunk, bool) or per_chunk < 1:
        yield problem(
            "kv cache", f"blocks_per_chunk is {format_value(per_chunk)}", "give a number, such as 8"
        )


def check_model(case: VllmCase) -> Iterator[Finding]:
    """Check the name of the model, and whether the model has several cache groups."""
    if case.model is None:
        return
    folder = Path(case.model)
    try:
        name = name_model(HostModel(case.model))
    except ConfigError as error:
        yield problem("model", str(error), "change its permissions")
        return
    settings = case.settings
    fact = f"{case.model} is taken by its name, not by its bytes: {name.unseen}"
    if name.unseen and settings is not None and settings.revision:
        yield ok("model", f"{fact}; --revision {settings.revision} tells its weights apart")
    elif name.unseen:
        yield warning("model", fact, "give --revision, and another one whenever the weights change")
    else:
        yield ok("model", f"{case.model} is {name.text[:23]}")
    if not folder.is_dir():
        return
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield warning("model", f"its config.json cannot be read ({error})", "see that it is whole")
        return
    kinds = config.get("layer_types") if isinstance(config, dict) else None
    if isinstance(kinds, list):
        yield from _check_kinds(case, sorted(set(map(str, kinds))))


def _check_kinds(case: VllmCase, kinds: Sequence[str]) -> Iterator[Finding]:
    """Check the kinds of a model's layers; vLLM makes a KV cache group for each kind."""
    named = ", ".join(kinds)
    if case.is_connector:
        unknown = [kind for kind in kinds if kind not in CONNECTOR_KINDS]
        if unknown:
            yield problem(
                "model", f"has layers of kind {', '.join(unknown)}, which {CONNECTOR} refuses",
                "use StrataSpec for it (stratakv config vllm, without --connector)",
            )  # fmt: skip
        else:
            yield ok("model", f"layers of kind {named}")
    elif len(kinds) > 1 and not set(kinds) <= set(SPEC_KINDS):
        yield warning(
            "model", f"has layers of kinds {named}, which were not tried beside each other with "
            "StrataSpec", "take StrataConnector, or compare answers with and without our tiers",
        )  # fmt: skip


CHECKS: tuple[Check[VllmCase], ...] = (
    check_python,
    check_block_hash,
    check_connector,
    check_settings,
    check_region,
    check_sizes,
    check_disk,
    check_remote,
    check_allocator,
    check_kv_cache,
    check_model,
)


def _check_layout(layout: str, *, is_cpu_build: bool) -> Iterator[Finding]:
    what, fact = "kv cache", f"VLLM_KV_CACHE_LAYOUT is {layout}"
    if layout in ALIASES:
        yield warning(what, f"{fact}, a name that stands for others", "see which one the log names")
    elif layout not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        yield problem(what, f"{fact}, which StrataKV cannot tell from others", f"use {known}")
    elif is_cpu_build and layout != CPU_LAYOUT:
        yield problem(what, f"{fact}, and the CPU build has {CPU_LAYOUT} alone", "leave it out")
    else:
        yield ok(what, fact)


def _taken(places: Sequence[Path]) -> str:
    sizes = [each.stat().st_size for each in places if each.exists()]
    return f"{len(places)} files of {rough_size(sum(sizes))}"
