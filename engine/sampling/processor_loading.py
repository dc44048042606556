# SPDX-License-Identifier: Apache-2.0
"""Finds the logits processors of other packages, by entry point or by the name of a class.

    [project.entry-points."stratakv.logits_processors"]
    no_repeat = "mypackage.processors:NoRepeat"

Processes send one another only the names of the classes. The sampler's process loads the classes to
run them; the API server loads the classes to check the parameters of requests. Without a processor
this module imports no heavy package."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, NamedTuple

from ...tiers.settings.values import ConfigError
from ..request.sampling_params import SamplingParams, UnreadExtraArgs

if TYPE_CHECKING:
    from .processors.base import LogitsProcessor

ENTRY_POINTS = "stratakv.logits_processors"

ParamsCheck = Callable[[SamplingParams], None]


class LoadedProcessor(NamedTuple):
    """A processor class, and its name for the operator and in error messages."""

    name: str
    kind: type[LogitsProcessor]


class InvalidProcessorParams(ValueError):
    """A processor does not support a request's parameters."""


class NobodyReads(InvalidProcessorParams, UnreadExtraArgs):
    """The request has `extra_args`, but no processor is loaded that could read them."""


def load_processors(names: Sequence[str] = ()) -> list[LoadedProcessor]:
    """Load the classes of all installed entry points in the order of their names, then the classes
    in `names` (`module:Class`), no class twice. Raises ConfigError, which names the class, if its
    import fails or uses a CUDA device, or if it is not a complete LogitsProcessor."""
    found: dict[type, LoadedProcessor] = {}
    for name, place in (*_installed().items(), *((name, name) for name in names)):
        kind = _load(name, place)
        found.setdefault(kind, LoadedProcessor(name, kind))
    return list(found.values())


def make_params_check(names: Sequence[str] = ()) -> ParamsCheck:
    """Return a check for arriving requests. This check raises InvalidProcessorParams, which names
    the processor, for parameters that a processor refuses, and NobodyReads for `extra_args` if no
    processor is loaded. Raises ConfigError like `load_processors`."""
    loaded = load_processors(names)

    def check(params: SamplingParams) -> None:
        if params.extra_args and not loaded:
            raise NobodyReads(
                "extra_args are for logits processors of other packages, and none is loaded here; "
                "start the engine with --logits-processors MODULE:CLASS, or leave them out"
            )
        for name, kind in loaded:
            try:
                kind.validate_params(params)
                kind.applies_to(params)
            except ValueError as error:
                raise InvalidProcessorParams(f"logits processor {name}: {error}") from error
            except Exception as error:  # foreign code: any exception refuses the request
                text = f"{type(error).__name__}: {error}"
                raise InvalidProcessorParams(f"logits processor {name}: {text}") from error

    return check


def _installed() -> dict[str, str]:
    """Return the `module:attribute` of each entry point by its name, sorted by name."""
    found: dict[str, str] = {}
    for point in _entry_points(tuple(sys.path)):
        place = f"{point.module}:{point.attr}"
        if found.setdefault(point.name, place) != place:
            raise ConfigError(
                f"several packages bring the logits processor {point.name}: {found[point.name]} "
                f"and {place}; remove all but one"
            )
    return found


@lru_cache(maxsize=4)
def _entry_points(_: tuple[str, ...]) -> Sequence[EntryPoint]:
    """Return the entry points, sorted by name. The result is cached per search path, because
    finding entry points opens a file of every installed package."""
    return sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name)


def _load(name: str, place: str) -> type[LogitsProcessor]:
    from .processors.base import LogitsProcessor

    module_name, _, path = place.partition(":")
    shown = name if name == place else f"{name} ({place})"
    if not (module_name and path):
        raise ConfigError(f"the logits processor {shown} names no class; say module:Class")
    with _without_devices(shown):
        found: Any = _import(shown, module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"the logits processor {shown} cannot be loaded: {module_name} has no {path}"
                + _about_main(module_name)
            )
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        what = f"of {_bases(found)}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise ConfigError(
            f"the logits processor {shown} is {what}; expected a subclass of LogitsProcessor in "
            "stratakv.engine.sampling.processors.base"
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"the logits processor {shown} does not define {missing}")
    return found


def _import(shown: str, module_name: str) -> object:
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # foreign code may raise any exception
        cure = ""
        if isinstance(error, ModuleNotFoundError):
            cure = "; install its package, or put its folder on PYTHONPATH"
        raise ConfigError(
            f"the logits processor {shown} cannot be loaded: importing {module_name} raised "
            f"{type(error).__name__}: {error}{cure}{_about_main(module_name)}"
        ) from error


def _about_main(module_name: str) -> str:
    if module_name != "__main__":
        return ""
    return ", the script of another process; move the class to a module of its own"


def _bases(kind: type) -> str:
    return f"the type {', '.join(base.__name__ for base in kind.__bases__)}"


@contextmanager
def _without_devices(shown: str) -> Iterator[None]:
    """Forbid CUDA devices in the `with` body: an import that opens a device takes device memory in
    every process, perhaps on another device than the engine's. Raises ConfigError if the body tried
    to open one."""
    import torch

    cuda: Any = torch.cuda
    if cuda.is_initialized():  # the model is loaded; the API server has checked the import
        yield
        return
    tried = False

    def refuse() -> None:
        nonlocal tried
        tried = True
        raise RuntimeError("no CUDA device may be used while a logits processor is imported")

    begin = cuda._lazy_init  # all code that opens a device calls `_lazy_init`
    cuda._lazy_init = refuse
    try:
        yield
    except ConfigError:
        if not tried:
            raise
    finally:
        cuda._lazy_init = begin
    if tried or cuda.is_initialized():
        raise ConfigError(
            f"the logits processor {shown} uses a CUDA device while it is imported; do that in its "
            "constructor, or in the first `apply`, on the device of the logits"
        )
