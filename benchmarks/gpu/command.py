# SPDX-License-Identifier: Apache-2.0
"""The command `stratakv bench gpu`; the package's docstring describes the measurements."""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from ...tiers.settings.values import ConfigError
from ..harness.plots import draw_and_tell
from ..harness.report import Report, chosen, package_versions, print_table, tell_failure
from . import ceilings
from .attention import decode, launch_sweep, peers, prefill, prefill_library, writes
from .copies import device_copies, interference, methods_section
from .engine import phases as engine_phases
from .engine import step as engine_step
from .section import Place, Results, Section, SectionOver

logger = logging.getLogger(__name__)

SECTIONS: tuple[Section, ...] = (
    ceilings.SECTION,
    writes.SECTION,
    decode.SECTION,
    prefill.SECTION,
    prefill_library.SECTION,
    methods_section.SECTION,
    device_copies.SECTION,
    interference.SECTION,
    engine_step.SECTION,
    engine_phases.SECTION,
    launch_sweep.SECTION,
    peers.SECTION,  # last, because other projects' kernels may leave the device unusable
)
_PACKAGES = ("torch", "triton", "fa3-fwd", "flash-attn-3", "vllm", "flashinfer-python")


def run(arguments: argparse.Namespace) -> int:
    """Run the sections; return 0, or 1 if one failed. Raises ConfigError."""
    sections = choose_sections(arguments.sections)
    limit = float("inf") if arguments.time_limit is None else arguments.time_limit
    if not limit > 0:
        raise ConfigError(f"--time-limit takes seconds above 0, not {limit:g}")
    place = choose_place(arguments)
    place.run_ends = time.monotonic() + limit
    results = Results(_new_report(place, arguments), arguments.out)
    errors = 0
    for section in sections:
        errors += not run_section(section, place, results)
        try:
            results.write()
        except OSError as error:
            raise ConfigError(
                f"--out {arguments.out} cannot be written ({error.strerror})"
            ) from error
    print_targets(sections, results, place)
    print(f"written: {results.write()}")
    for section in sections:
        draw_and_tell(partial(section.plot, results, arguments.out))
    return 1 if errors else 0


def choose_sections(wanted: str | None) -> tuple[Section, ...]:
    """Return the named sections and the section `ceilings`, in the order of the run."""
    names = chosen("--sections", wanted, [section.name for section in SECTIONS])
    return tuple(s for s in SECTIONS if s.name in names or s is ceilings.SECTION)


def choose_place(arguments: argparse.Namespace) -> Place:
    """Return the GPU, or the CPU for a rehearsal. Raises ConfigError if there is no GPU."""
    peers = Path(arguments.peers) if arguments.peers else None
    if peers is not None and not peers.is_dir():
        raise ConfigError(f"--peers takes a folder with installed packages, and {peers} is none")
    if arguments.rehearse:
        torch.set_num_threads(1)  # on such small tensors, threads would only wait for each other
        return Place(torch.device("cpu"), arguments.quick, is_rehearsal=True, peers=peers)
    if not torch.cuda.is_available():
        raise ConfigError(
            "bench gpu needs a CUDA device and torch sees none; look at nvidia-smi and at "
            "torch.version.cuda, or try the benchmark itself with --rehearse"
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ConfigError("TRITON_INTERPRET=1 runs kernels on the CPU; unset it for bench gpu")
    return Place(torch.device("cuda"), arguments.quick, is_rehearsal=False, peers=peers)


def run_section(section: Section, place: Place, results: Results) -> bool:
    """Run one section; return False if the section failed, after which later sections run."""
    print(f"{section.title} …", flush=True)
    place.start_section()
    try:
        section.run(place, results)
    except SectionOver:
        results.add_note(section.name, "its time was over before all cases were measured")
    except Exception as error:  # Triton's errors have no common base class
        logger.debug("section %s", section.name, exc_info=True)
        results.add_note(section.name, f"failed: {type(error).__name__}: {error}")
        tell_failure(f"gpu, {section.name}", error)
        return False
    finally:
        place.release_memory()
    return True


def print_targets(sections: Sequence[Section], results: Results, place: Place) -> None:
    """Print the table of targets: each target, its measured value, and whether it is met."""
    if place.is_rehearsal:
        print("a rehearsal on the CPU: no figure of it says anything about a GPU")
        return
    rows = []
    for target in (target for section in sections for target in section.targets):
        value = results.report.ratios.get(target.name)
        if value is None:
            rows.append([target.what, target.wanted, "-", "not measured"])
        else:
            verdict = "met" if target.is_met(value) else "MISSED"
            rows.append([target.what, target.wanted, f"{value:.3g}{target.unit}", verdict])
    print_table("Targets", ["target", "wanted", "measured", ""], rows)


def _new_report(place: Place, arguments: argparse.Namespace) -> Report:
    command = "stratakv bench gpu"
    command += " --quick" if arguments.quick else ""
    command += " --rehearse" if arguments.rehearse else ""
    report = Report("gpu", command)
    report.environment["device"] = (
        "cpu, a rehearsal" if place.is_rehearsal else torch.cuda.get_device_name()
    )
    report.environment["cuda"] = torch.version.cuda
    if not place.is_rehearsal:
        properties = torch.cuda.get_device_properties(place.device)
        report.environment["capability"] = f"{properties.major}.{properties.minor}"
        report.environment["multiprocessors"] = properties.multi_processor_count
        report.environment["device_memory_gib"] = round(properties.total_memory / 2**30, 1)
    report.environment["packages"] |= package_versions(_PACKAGES)
    return report
