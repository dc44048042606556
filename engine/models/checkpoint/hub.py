# SPDX-License-Identifier: Apache-2.0
"""Models that are named by their id on the Hugging Face Hub, read from the local cache or
downloaded into it.

`huggingface_hub` manages the cache, so other programs share it. The library's environment variables
apply: HF_HOME and HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. Only files in a fixed list
or in the index of the weights are downloaded, never code or pickled weights. Weights are downloaded
last, so a directory with weights is complete. An interrupted download continues at the next
start."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ....tiers.settings.format import format_value, one_line
from ....tiers.settings.values import ConfigError
from .generation_config import GENERATION_CONFIG
from .shards import INDEX_FILE, SINGLE_FILE, find_shards, read_weight_map

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
# Files that are downloaded after config.json and before the weights.
_SMALL_FILES = (
    GENERATION_CONFIG, TOKENIZER, "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja",
)  # fmt: skip
_WEIGHTS_SUFFIX = ".safetensors"
_MAIN = "main"
_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_REVISION = re.compile(r"\w[\w./-]*", re.ASCII)
_ANSWER_SECONDS = 10.0


def is_hub_id(text: str) -> bool:
    """Whether a text has the form `org/model` of a model id; a path may have this form too."""
    return _ID.fullmatch(text) is not None


def fetch_model(repo_id: str, revision: str = "", *, needs_weights: bool = True) -> Path:
    """Return the directory of a model. A model in the cache needs no request to the Hub; another
    model is downloaded with a progress bar on standard error. The directory has the weights;
    without `needs_weights`, the directory may have only the configuration.

    Raises ConfigError with a remedy if the model cannot be downloaded."""
    revision = revision or _MAIN
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise ConfigError(
            f"--revision takes a branch, tag or commit of {repo_id}, not {format_value(revision)}"
        )
    cached = _cached(repo_id, revision)
    if cached is not None and (not needs_weights or _is_whole(cached)):
        return cached
    try:
        return _download(repo_id, revision, needs_weights=needs_weights)
    except _Unreachable as error:
        # The tokenizer may be missing: programs that need no tokenizer do not download it.
        if cached is not None and _has_weights(cached):
            return cached
        raise ConfigError(str(error)) from error


class _Unreachable(Exception):
    """The Hub did not answer. The caller may still find the model in the cache."""


def _cached(repo_id: str, revision: str) -> Path | None:
    """Return the cache's folder for this revision, which may lack files; None if the cache has
    none."""
    from huggingface_hub import try_to_load_from_cache

    with _explained(repo_id, revision):
        found = try_to_load_from_cache(repo_id, CONFIG, revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _is_whole(folder: Path) -> bool:
    return (folder / TOKENIZER).is_file() and _has_weights(folder)


def _has_weights(folder: Path) -> bool:
    try:
        return bool(find_shards(folder).files)
    except ConfigError:  # a weight file of the index is missing, or a link is broken
        return False


def _download(repo_id: str, revision: str, *, needs_weights: bool) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    with _explained(repo_id, revision):
        info = HfApi().model_info(repo_id, revision=revision, timeout=_ANSWER_SECONDS)
    names = {each.rfilename for each in info.siblings or ()}
    _check_names(repo_id, names, needs_weights=needs_weights)

    def take(name: str, at: str) -> Path:
        with _explained(repo_id, revision):
            return Path(hf_hub_download(repo_id, name, revision=at))

    # `revision` is used unresolved, so that the cache finds it later without a network.
    folder = take(CONFIG, revision).parent
    commit = folder.name
    small = _SMALL_FILES if needs_weights else (GENERATION_CONFIG,)
    for name in small:
        if name in names:
            take(name, commit)
    if not needs_weights:
        return folder
    if SINGLE_FILE in names:
        take(SINGLE_FILE, commit)
        return folder
    take(INDEX_FILE, commit)
    for name in sorted(set(read_weight_map(folder).values())):
        if not name.endswith(_WEIGHTS_SUFFIX) or name not in names:
            raise ConfigError(
                f"{INDEX_FILE} of {repo_id} names {format_value(name)}, which is no "
                f"{_WEIGHTS_SUFFIX} "
                "file of the repository; take another revision or another model"
            )
        take(name, commit)
    return folder


def _check_names(repo_id: str, names: set[str], *, needs_weights: bool) -> None:
    if CONFIG not in names:
        raise ConfigError(
            f"{repo_id} on the Hub has no {CONFIG}, so it is no model in the form of transformers; "
            "take another"
        )
    if needs_weights and not names.intersection((SINGLE_FILE, INDEX_FILE)):
        others = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf")))
        has = f" (it has {format_value(others[0])})" if others else ""
        raise ConfigError(
            f"{repo_id} on the Hub has neither {SINGLE_FILE} nor {INDEX_FILE}{has}, and other "
            "forms of weights are not read; take a model or a revision with safetensors"
        )


@contextmanager
def _explained(repo_id: str, revision: str) -> Iterator[None]:
    """Convert errors that huggingface_hub raises in the `with` body to ConfigError or
    _Unreachable."""
    from huggingface_hub import constants, errors

    at = "" if revision == _MAIN else f" --revision {revision}"
    try:
        yield
    except ConfigError:
        raise
    except errors.HFValidationError as error:
        raise ConfigError(f"{repo_id} can be no id of the Hub ({_reason(error)})") from error
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{repo_id} is gated on the Hub: accept its terms at {constants.ENDPOINT}/{repo_id} "
            "and give HF_TOKEN a token of that account (or run `hf auth login`)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"{repo_id} on the Hub has no revision {format_value(revision)}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{repo_id} is neither a directory here nor a model on the Hub that this user may "
            "read; correct the name or, if it is private, give HF_TOKEN a token that may read it"
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise ConfigError(
            f"{repo_id} on the Hub lacks a file it lists ({_reason(error)})"
        ) from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 0)
        if status in (401, 403):
            raise ConfigError(
                f"{repo_id} may not be read with this token (HTTP {status}); give HF_TOKEN a token "
                f"of an account that has access to {constants.ENDPOINT}/{repo_id}"
            ) from error
        raise _Unreachable(_offline(repo_id, at, f"answers with HTTP {status}")) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        why = "is not asked, since HF_HUB_OFFLINE is set"
        why = why if constants.HF_HUB_OFFLINE else f"cannot be reached ({_reason(error)})"
        raise _Unreachable(_offline(repo_id, at, why)) from error
    except Exception as error:  # of the HTTP library, which depends on huggingface_hub's version
        why = f"could not be read from to the end ({_reason(error)})"
        raise _Unreachable(_offline(repo_id, at, why)) from error


def _offline(repo_id: str, at: str, why: str) -> str:
    from huggingface_hub import constants

    return (
        f"{repo_id} is not whole in the cache ({constants.HF_HUB_CACHE}), and the Hub {why}; run "
        f"`hf download {repo_id}{at}` where there is a network, or give a model directory"
    )


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return one_line(lines[0] if lines else type(error).__name__)[:200]
