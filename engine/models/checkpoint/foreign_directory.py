# SPDX-License-Identifier: Apache-2.0
"""Error texts for directories and files that are not a model in the supported form.

Each error text says what the directory or file is and what the user should give instead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ....tiers.settings.format import format_name, format_value

_MOST_NAMES = 2000  # how many entries of a directory are read at most
_MOST_BYTES = 64 * 1024
CHECKPOINT = "checkpoint-"


def explain_no_config(path: Path) -> str:
    """Explain why a directory without config.json is not a model, and what to give instead."""
    names = sorted(_names(path))
    found = next(_kinds(path, names), None)
    return found or f"{path / 'config.json'} is missing; the model must be a Hugging Face directory"


def explain_no_weights(path: Path) -> str:
    """Return a text that names the form of the weights in a directory that has config.json but no
    safetensors files. The text is empty if the form is unknown."""
    names = sorted(_names(path))
    if "adapter_config.json" in names:
        return _adapter(path)
    for suffix, form in ((".gguf", "GGUF"), (".bin", "PyTorch's pickled form")):
        weights = [name for name in names if name.endswith(suffix)]
        if weights:
            return (
                f"{path} holds weights in {form} ({format_name(weights[0])}), which is not read; "
                "download or convert them in safetensors form"
            )
    if _checkpoints(names):
        return _trainer(path, names)
    return ""


def explain_file(path: Path) -> str:
    """Explain why a file is not a model directory, and what to give instead."""
    if path.suffix == ".gguf":
        return (
            f"{path} is a GGUF file, which is not read; give the directory of the model it was "
            "made of, in safetensors form"
        )
    if path.suffix == ".safetensors":
        return f"{path} is one file of a model; give its directory, {path.parent}"
    return ""


def _kinds(path: Path, names: list[str]) -> Iterator[str]:
    if "adapter_config.json" in names:
        yield _adapter(path)
    if any(name.endswith(".gguf") for name in names):
        yield (
            f"{path} holds GGUF files, which are not read; give the directory of the model they "
            "were made of, in safetensors form"
        )
    models = [name for name in names if name.startswith("models--")]
    if models:
        model = models[0].removeprefix("models--").replace("--", "/")
        yield (
            f"{path} is a cache of the Hub and not a model in it; give the id of one, such as "
            f"{format_value(model)}"
        )
    if {"snapshots", "refs"} <= set(names):
        snapshots = sorted(_names(path / "snapshots"))
        instead = path / "snapshots" / snapshots[0] if snapshots else "the model's id"
        yield f"{path} is a model's folder in the Hub's cache; give {instead}"
    if _checkpoints(names):
        yield _trainer(path, names)
    if "params.json" in names and any(name.startswith("consolidated") for name in names):
        yield (
            f"{path} is a checkpoint in the form of its authors (params.json, consolidated "
            "weights); give the one in the form of transformers, with config.json"
        )


def _adapter(path: Path) -> str:
    try:
        with (path / "adapter_config.json").open("rb") as file:
            about = json.loads(file.read(_MOST_BYTES))
        base = about.get("base_model_name_or_path") if isinstance(about, dict) else None
    except (OSError, ValueError, RecursionError):
        base = None
    of = f" of {format_value(base)}" if isinstance(base, str) and base else ""
    return (
        f"{path} is an adapter{of} (adapter_config.json) and not a model, and adapters are not "
        "served; merge it into its model and give that"
    )


def _trainer(path: Path, names: list[str]) -> str:
    last = max(_checkpoints(names), key=lambda name: int(name.removeprefix(CHECKPOINT)))
    return f"{path} is the output of a training run; give one of its checkpoints, {path / last}"


def _checkpoints(names: list[str]) -> list[str]:
    return [
        name
        for name in names
        if name.startswith(CHECKPOINT) and name.removeprefix(CHECKPOINT).isdecimal()
    ]


def _names(path: Path) -> Iterator[str]:
    try:
        for number, entry in enumerate(path.iterdir()):
            if number == _MOST_NAMES:
                return
            yield entry.name
    except OSError:
        return
