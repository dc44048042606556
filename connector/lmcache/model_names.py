# SPDX-License-Identifier: Apache-2.0
"""The names of LMCache's models: digests of their files, if the files are on this machine.

LMCache's server loads no model; each engine loads the model at its own time. So a thread makes the
digest once, when the first chunk of a model comes. If the files change later, engines may have the
old or the new weights, so chunks of that model are no longer stored."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

from ...tiers.settings.format import format_value
from ...tiers.settings.values import ConfigError
from ..chunks.model_name import HostModel, ModelName, name_model, warn_of_unseen

log = logging.getLogger(__name__)

HOST = "LMCache"
MOST_MODELS = 64
# The longest wait of a model's first call; small models and models in the digest cache need less.
FIRST_SECONDS = 1.0
CHECK_SECONDS = 1.0  # between two checks of the files


@dataclass(slots=True)
class _Model:
    """A model in LMCache's keys."""

    ready: threading.Event = field(default_factory=threading.Event)
    name: ModelName | None = None  # None: the model's chunks are not stored
    checked_at: float = 0.0  # monotonic


class ModelNames:
    """Turns LMCache's model names into names for keys. Thread-safe."""

    def __init__(self, revision: str | None) -> None:
        """`revision` is StrataKV's setting `revision`."""
        self._revision = revision
        self._lock = threading.Lock()
        self._models: dict[str, _Model] = {}
        self._refused: list[str] = []

    @property
    def refused(self) -> list[str]:
        """Return why chunks are not stored, with one sentence for each refused model."""
        with self._lock:
            return list(self._refused)

    def resolve_name(self, model: str) -> str | None:
        """Return a model's name in keys; None if its chunks are not stored, or during hashing."""
        with self._lock:
            known = self._models.get(model)
            is_new = known is None and len(self._models) < MOST_MODELS
            if is_new:
                known = self._models[model] = _Model()
        if known is None:
            return None
        if is_new:
            arguments = (model, known)
            threading.Thread(
                target=self._hash, args=arguments, name="stratakv-model", daemon=True
            ).start()
            known.ready.wait(FIRST_SECONDS)
        if not known.ready.is_set() or known.name is None:
            return None
        self._check_unchanged(model, known)
        return None if known.name is None else known.name.text

    def _hash(self, model: str, known: _Model) -> None:
        try:
            host_model = HostModel(model)
            name = name_model(host_model, log.info)
            warn_of_unseen(HOST, host_model, name, self._revision)
            known.name = name
        except ConfigError as error:
            self._refuse(f"no chunk of {format_value(model)} is kept: {error}")
        except Exception as error:
            log.exception("the files of a model could not be hashed")
            self._refuse(f"no chunk of {format_value(model)} is kept: {type(error).__name__}")
        finally:
            known.checked_at = time.monotonic()
            known.ready.set()

    def _check_unchanged(self, model: str, known: _Model) -> None:
        now = time.monotonic()
        with self._lock:
            if now - known.checked_at < CHECK_SECONDS:
                return
            known.checked_at = now
            name = known.name
        if name is not None and not name.is_unchanged:
            known.name = None
            self._refuse(
                f"the files of {format_value(model)} have changed since they were hashed, so that "
                "engines may have other weights than these; restart this server when all engines "
                "have the new ones"
            )

    def _refuse(self, reason: str) -> None:
        with self._lock:
            self._refused.append(reason)
        log.error("StrataKV below %s: %s", HOST, reason)
