# SPDX-License-Identifier: Apache-2.0
"""The rates of a plan (bytes, operations or tokens per second): given by the user, measured on this
machine in about a second, or reference values.

The plan prints the origin of every rate."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...tiers.settings.values import ConfigError
from ..config.engine_options import default_ssd_path

# The names of the rates. PLACES are also the sources from which blocks are loaded.
PLACES = ("cpu", "ssd", "network")
OPERATIONS = "operations"
PREFILL_TOKENS = "prefill_tokens"
GIVEN, MEASURED, REFERENCE = "given", "measured", "reference"

# Flag of `stratakv plan` → the name and the unit of the rate that the flag sets.
_FLAGS = {
    "cpu_bandwidth": ("cpu", "bytes"),
    "ssd_bandwidth": ("ssd", "bytes"),
    "network_bandwidth": ("network", "bytes"),
    "flops": (OPERATIONS, "operations"),
    "prefill_tokens_per_second": (PREFILL_TOKENS, "tokens"),
}


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate, and the origin of its value."""

    per_second: float
    origin: str  # the origin of the value: GIVEN, MEASURED or REFERENCE
    what: str  # the unit, and how the value was found


REFERENCES: Mapping[str, Rate] = {
    "cpu": Rate(28e9, REFERENCE, "bytes, large copies over PCIe 5.0 x16 one way"),
    "ssd": Rate(7e9, REFERENCE, "bytes, one NVMe drive on PCIe 4.0 read in sequence"),
    "network": Rate(50e9, REFERENCE, "bytes, a link of 400 Gbit/s"),
    OPERATIONS: Rate(4e14, REFERENCE, "operations, 40 % of an H100's dense bfloat16 peak"),
}


def resolve_rates(given: Mapping[str, Any], probe: bool) -> dict[str, Rate]:
    """Return the rates that the plan needs, by name. `probe`: rates that the user does not give are
    measured. The network cannot be measured, so a plan with `probe` has no rate of the network.
    Raises ConfigError for contradictory flags, and if the disk cannot be measured."""
    if "flops" in given and "prefill_tokens_per_second" in given:
        raise ConfigError(
            "--flops and --prefill-tokens-per-second both set how fast prompts are computed; "
            "give one"
        )
    rates = {
        name: Rate(given[flag], GIVEN, unit)
        for flag, (name, unit) in _FLAGS.items()
        if flag in given
    }
    for name, reference in REFERENCES.items():
        if name in rates or (name == OPERATIONS and PREFILL_TOKENS in rates):
            continue
        if not probe:
            rates[name] = reference
        elif name in _PROBES:
            rates[name] = _PROBES[name]()
    return {name: rates[name] for name in (*REFERENCES, PREFILL_TOKENS) if name in rates}


# The probes need torch, so each function imports its probe: --help works without torch.
def _measure_memory() -> Rate:
    from ..config.machine_probes import memory_copy_bytes_per_second

    return Rate(memory_copy_bytes_per_second(), MEASURED, "bytes, one thread copying memory")


def _measure_operations() -> Rate:
    from ..config.machine_probes import multiply_operations_per_second

    rate = multiply_operations_per_second()
    return Rate(rate, MEASURED, "operations, a product of float32 matrices")


def _measure_disk() -> Rate:
    from ..config.machine_probes import disk_read_bytes_per_second

    try:
        place = existing_parent(default_ssd_path())
    except ConfigError as error:
        raise ConfigError(
            f"{error}; here give --ssd-bandwidth, or --no-probe for reference figures"
        ) from None
    try:
        rate = disk_read_bytes_per_second(place)
    except OSError as error:
        raise ConfigError(
            f"the disk cannot be measured in {place} ({error.strerror}); give --ssd-bandwidth, or "
            "--no-probe for reference figures"
        ) from error
    return Rate(rate, MEASURED, f"bytes, one thread reading a file in {place}")


_PROBES: Mapping[str, Callable[[], Rate]] = {
    "cpu": _measure_memory,
    "ssd": _measure_disk,
    OPERATIONS: _measure_operations,
}


def existing_parent(path: Path) -> Path:
    """Return `path` if it is a directory, else the nearest existing directory above `path`."""
    return next(each for each in (path, *path.absolute().parents) if os.path.isdir(each))
