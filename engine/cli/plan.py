# SPDX-License-Identifier: Apache-2.0
"""`stratakv plan`: computes, before an engine starts, the memory that a model needs, the capacity
of the tiers, and from which length a prefix is loaded faster than computed.

The command reads config.json and checks whether the weight files exist. In `engine/plan`,
`memory_plan.py` has the arithmetic, `machine_rates.py` the rates, and `table.py` the printing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...tiers.block import DTYPE_BYTES, BlockLayout
from ...tiers.errors import TierConfigError
from ...tiers.settings import readers
from ...tiers.settings.format import format_value
from ...tiers.settings.option import flag_of
from ...tiers.settings.readers import Reader
from ...tiers.settings.sizes import rough_size
from ...tiers.settings.values import MIB, ConfigError
from ...tiers.slab.host_memory import available_memory_bytes
from ...tiers.ssd.disk.space import plan_space
from ..cache.group_spec import CacheGroups, plan_groups, state_bytes, states_of_request
from ..config.engine_config import CacheConfig, ModelConfig, SchedulerConfig
from ..config.engine_options import model_directory
from ..config.speculative_config import MOST_WITH_STATES
from ..models.checkpoint.shards import find_shards
from ..models.dtypes import planned_dtype
from ..models.model_spec import ModelSpec, resolve_max_model_len
from ..models.spec.spec_parser import load_model_spec
from ..models.vision.vision_shapes import weight_shapes
from ..plan import memory_plan as plan
from ..plan.machine_rates import OPERATIONS, PLACES, PREFILL_TOKENS, Rate, resolve_rates

DESCRIPTION = "Say what a model and its KV cache take, what fits, and when loading pays."

TYPICAL_TOKENS = 2048
MAX_DEVICES = 1024
MAX_SEQS = 1 << 20
# Bounds of a rate (bytes or operations per second), wider than the rate of any computer.
MAX_PER_SECOND = 1e24
MIN_PER_SECOND = 1e-3

_SIZES = ("memory", "cpu", "ssd", "reserve")  # sizes that are printed in the user's own unit


def _size(called: str, value: Any) -> int:
    size: int = readers.size(called, value)
    if size < 1:
        raise ConfigError(f"{called} must be at least 1 byte, not {value}; leave it out for none")
    return size


def _bytes_per_second(called: str, value: str) -> float:
    return float(_size(called, value.removesuffix("/s")))


def _per_second(called: str, value: str) -> float:
    number = readers.number(called, value)
    if not MIN_PER_SECOND <= number <= MAX_PER_SECOND:  # this refuses NaN too
        raise ConfigError(
            f"{called} takes a number from {MIN_PER_SECOND:g} to {MAX_PER_SECOND:g}, not "
            f"{format_value(value)}"
        )
    return number


# Flag → (reader of the value, metavar, help)
_FLAGS: Mapping[str, tuple[Reader, str, str]] = {
    "memory": (_size, "SIZE", "memory of one device (default: what this machine has left)"),
    "cpu": (_size, "SIZE", "size of the cpu tier (default: none)"),
    "ssd": (_size, "SIZE", "size of the ssd tier (default: none)"),
    "revision": (readers.text, "TEXT", "branch, tag or commit of a model on the Hub"),
    "block_size": (readers.integer, "N", "tokens in a block (default: 16)"),
    "dtype": (readers.text, "TYPE", "number type of the weights (default: auto, the checkpoint's)"),
    "kv_dtype": (
        readers.one_of("auto", *DTYPE_BYTES), "TYPE",
        "number type of K and V (default: auto, as the weights)",
    ),
    "max_model_len": (
        readers.integer, "N", "tokens of the longest request (default: what the model allows)",
    ),
    "request_tokens": (
        readers.integer, "N", f"tokens of a typical request (default: up to {TYPICAL_TOKENS})",
    ),
    "max_num_seqs": (
        readers.integer_within(1, MAX_SEQS), "N",
        "requests that run at once, whose states are reckoned (default: as serve's)",
    ),
    "num_speculative_tokens": (
        readers.integer_within(0, MAX_SEQS), "N",
        "draft tokens of a step, each of which has states (default: 0)",
    ),
    "reserve": (readers.size, "SIZE", "memory beside weights and KV (default: an estimate)"),
    "tensor_parallel_size": (
        readers.integer_within(1, MAX_DEVICES), "N", "devices that share the model (default: 1)",
    ),
    "cpu_bandwidth": (
        _bytes_per_second, "RATE", "bytes/s from the cpu tier to one device (default: measured)",
    ),
    "ssd_bandwidth": (
        _bytes_per_second, "RATE", "bytes/s read from the ssd tier (default: measured)",
    ),
    "network_bandwidth": (
        _bytes_per_second, "RATE", "bytes/s from another host (default: left out)",
    ),
    "flops": (_per_second, "N", "operations/s of one device (default: measured)"),
    "prefill_tokens_per_second": (
        _per_second, "N", "prompt tokens/s of all devices, instead of --flops",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Subject:
    """The model and memory of a plan. Bytes and layout are those of one device."""

    path: Path
    spec: ModelSpec
    shapes: plan.Shapes
    dtype: str
    max_model_len: int
    typical_tokens: int
    num_devices: int
    layout: BlockLayout  # the layout of a block that has all layers
    groups: CacheGroups
    memory: plan.Memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?",
        help="a directory with config.json, or org/model on the Hub (default: the embedded model)",
    )  # fmt: skip
    for name, (_, metavar, text) in _FLAGS.items():
        parser.add_argument(flag_of(name), metavar=metavar, help=text)
    parser.add_argument(
        "--probe", action=argparse.BooleanOptionalAction, default=True,
        help="measure rates that are not given, or take reference figures",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Print the plan, and return 0. Raises ConfigError."""
    given = {
        name: read(flag_of(name), getattr(args, name))
        for name, (read, *_) in _FLAGS.items()
        if getattr(args, name) is not None
    }
    path = model_directory(args.model, given.get("revision", ""), needs_weights=False)
    made = make_plan(path, given, args.probe)
    if args.json:
        print(json.dumps(made, indent=2, allow_nan=False))
    else:
        from ..plan.table import print_plan

        print_plan(made, {name: getattr(args, name) for name in _SIZES if name in given})
    return 0


def make_plan(path: Path, given: Mapping[str, Any], probe: bool) -> dict[str, Any]:
    """Return the whole plan in its JSON form. Raises ConfigError."""
    subject = _subject(path, given)
    tiers = _tiers(subject, given)
    rates = resolve_rates(given, probe)  # after all checks, because the probes take a second
    return {
        "model": _model(subject),
        "block": {
            "tokens": subject.layout.block_size,
            "kv_dtype": subject.layout.kv_dtype,
            "bytes_per_token": subject.layout.token_bytes,
            "bytes": subject.layout.page_bytes,
        },
        "groups": [asdict(group) for group in _groups(subject)],
        "memory": {**asdict(subject.memory), "kv_bytes": subject.memory.kv_bytes},
        "tiers": {name: asdict(held) for name, held in tiers.items()},
        "waste": asdict(plan.waste(subject.layout, subject.typical_tokens)),
        "rates": {name: asdict(rate) for name, rate in rates.items()},
        **_loading(subject, rates),
        "notes": _notes(subject, given, rates, tiers["pool"]),
    }


def _subject(path: Path, given: Mapping[str, Any]) -> Subject:
    spec = load_model_spec(path)
    lengths = given.get("max_model_len")
    model = ModelConfig(path, path.name, dtype=given.get("dtype", "auto"), max_model_len=lengths)
    max_model_len = resolve_max_model_len(spec, model.max_model_len)
    dtype = planned_dtype(model.dtype, spec.stored_dtype)
    kv_dtype = given.get("kv_dtype", "auto")
    devices = given.get("tensor_parallel_size", 1)
    block_size = CacheConfig(block_size=given.get("block_size", 16)).block_size
    layout = plan.device_layout(
        spec, block_size, dtype if kv_dtype == "auto" else kv_dtype, devices
    )
    shapes = weight_shapes(spec)
    states = state_bytes(spec.state, dtype)
    num_seqs = given.get("max_num_seqs", SchedulerConfig().max_num_seqs)
    memory = plan.Memory(
        total_bytes=_memory_bytes(given),
        weight_bytes=plan.weight_bytes(shapes, dtype, devices),
        reserve_bytes=given.get("reserve", plan.activation_bytes(spec, dtype)),
        state_bytes=(
            0
            if states is None
            else plan.running_state_bytes(states, num_seqs, devices, _num_drafts(given))
        ),
    )
    plan.check_memory(memory, layout)
    typical = _typical_tokens(given, max_model_len)
    groups = plan_groups(layout, 1, spec.layer_attention, states=states)
    return Subject(
        path, spec, shapes, dtype, max_model_len, typical, devices, layout, groups, memory
    )


def _num_drafts(given: Mapping[str, Any]) -> int:
    """Return a request's draft tokens in a step, for a model with recurrent states."""
    num_drafts: int = given.get("num_speculative_tokens", 0)
    return min(num_drafts, MOST_WITH_STATES)


def _groups(subject: Subject) -> list[plan.Group]:
    state = subject.spec.state
    layers = () if state is None else state.layers
    return plan.group_table(subject.groups, subject.max_model_len, layers)


def _memory_bytes(given: Mapping[str, Any]) -> int:
    size = given.get("memory") or available_memory_bytes()
    if size is None:
        raise ConfigError("this machine does not say how much memory it has left; give --memory")
    return int(size)


def _typical_tokens(given: Mapping[str, Any], max_model_len: int) -> int:
    tokens = int(given.get("request_tokens", min(TYPICAL_TOKENS, max_model_len)))
    if not 1 <= tokens <= max_model_len:
        raise ConfigError(
            f"--request-tokens takes a number from 1 to the {max_model_len} tokens of the longest "
            f"request, not {format_value(tokens)}"
        )
    return tokens


def _model(subject: Subject) -> dict[str, Any]:
    elements = plan.num_elements(subject.shapes)
    return {
        "path": str(subject.path),
        "architecture": subject.spec.architecture,
        "parameters": elements,
        "dtype": subject.dtype,
        "parameter_bytes": elements * DTYPE_BYTES[subject.dtype],
        "weight_files": _weight_files(subject.path),
        "max_model_len": subject.max_model_len,
        "typical_tokens": subject.typical_tokens,
        "tensor_parallel_size": subject.num_devices,
    }


def _weight_files(path: Path) -> dict[str, int] | None:
    """Return the count and size of the model's safetensors files; None if a file is missing."""
    try:
        files = find_shards(path).files
    except ConfigError:  # a plan needs no weight files
        return None
    return {"files": len(files), "bytes": sum(file.stat().st_size for file in files)}


def _tiers(subject: Subject, given: Mapping[str, Any]) -> dict[str, plan.Capacity]:
    layout, devices, kv_bytes = subject.layout, subject.num_devices, subject.memory.kv_bytes
    lengths = {
        "max_model_len": subject.max_model_len,
        "typical_tokens": subject.typical_tokens,
    }
    size = layout.block_size
    pool = plan.pool_capacity(subject.groups, kv_bytes, **lengths)
    tiers = {"pool": pool}
    if "cpu" in given:
        blocks = given["cpu"] // (devices * layout.slot_bytes)
        if blocks == 0:
            raise ConfigError(
                f"--cpu {rough_size(given['cpu'])} holds no block; give at least "
                f"{-(-devices * layout.slot_bytes // MIB)}MiB"
            )
        tiers["cpu"] = plan.capacity(given["cpu"], blocks, size, **lengths)
    if "ssd" in given:
        try:
            blocks = plan_space(layout, given["ssd"] // devices).num_slots
        except TierConfigError as error:
            raise ConfigError(
                f"--ssd {rough_size(given['ssd'])} on {devices} device(s): {error}"
            ) from error
        tiers["ssd"] = plan.capacity(given["ssd"], blocks, size, **lengths)
    return tiers


def _loading(subject: Subject, rates: Mapping[str, Rate]) -> dict[str, Any]:
    layout, devices = subject.layout, subject.num_devices
    if PREFILL_TOKENS in rates:
        prefill = plan.Prefill(1 / rates[PREFILL_TOKENS].per_second)
    else:
        operations = rates[OPERATIONS].per_second * devices
        prefill = plan.prefill_of(subject.shapes, subject.spec, operations)
    ways = {place: rates[place].per_second for place in PLACES if place in rates}
    seconds = plan.block_seconds(layout, ways, devices)
    lengths = plan.prefix_lengths(subject.max_model_len)
    state = subject.groups.state
    num_state_blocks = 0 if state is None else state.num_pages
    return {
        "loads": [
            asdict(load)
            for load in plan.loads(lengths, layout, seconds, prefill, devices, num_state_blocks)
        ],
        "break_even_tokens": {
            place: plan.break_even_tokens(each, layout.block_size, prefill, num_state_blocks)
            for place, each in seconds.items()
        },
    }


def _notes(
    subject: Subject, given: Mapping[str, Any], rates: Mapping[str, Rate], pool: plan.Capacity
) -> list[str]:
    """Return sentences about the plan's assumptions, and about limits that `serve` would apply."""
    notes = []
    if "reserve" not in given:
        notes.append("the reserve is an estimate for steps of the default size")
    if OPERATIONS in rates:
        notes.append(
            "computing is reckoned at the whole rate of operations; a model does not reach it, so "
            "loading gains more than this says"
        )
    if subject.num_devices > 1:
        notes.append(
            "several devices are reckoned to share work and matrices evenly; this version "
            "computes on one"
        )
    if subject.dtype in ("bfloat16", "float16") and "dtype" not in given:
        notes.append(
            f"reckoned in {subject.dtype}, the checkpoint's; a CPU without units for it computes "
            "in float32, in twice the memory"
        )
    if subject.layout.kv_dtype != subject.dtype:
        notes.append(f"this version keeps K and V in the type of the weights, {subject.dtype}")
    if subject.groups.forgets:
        notes.append(
            "layers with windows hold what these and a step of the default size take, whatever the "
            "length; tiers keep every block, and loads are reckoned with all of them"
        )
    if subject.groups.state is not None:
        num_seqs = given.get("max_num_seqs", SchedulerConfig().max_num_seqs)
        slots = states_of_request(_num_drafts(given))
        many = f", {slots} times since each draft has its own" if slots > 1 else ""
        notes.append(
            f"layers carry states: {rough_size(subject.groups.state.states.num_bytes)} of each "
            f"running request{many}, reckoned for {num_seqs} of them (on a CPU those that "
            "have run take it), and as much of the pool and of a tier for each checkpoint, one of "
            "which a prompt leaves"
        )
    if pool.requests_of_max_model_len == 0:
        notes.append(
            f"the KV pool cannot hold one request of {subject.max_model_len:,} tokens; serve would "
            f"take requests of up to {pool.tokens:,}"
        )
    return notes
