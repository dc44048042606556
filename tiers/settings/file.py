# SPDX-License-Identifier: Apache-2.0
"""Reads settings from a flat YAML or TOML file; the extension of the file name decides the format.

Each key is an option's name, with `-` or `_`, and may occur only once. Values must not be nested
and must not have types that need YAML tags. Raises ConfigError that names the file and the key."""

from __future__ import annotations

import errno
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .format import format_name
from .values import ConfigError

MAX_BYTES = 256 * 1024
MAX_KEY_CHARACTERS = 64

# Quotations from the file in PyYAML's messages, but not token names or single characters.
_QUOTED = re.compile(r" (['\"])(?!<)[^'\"]{4,}\1")
_NULL = "tag:yaml.org,2002:null"


def read_file(path: Path) -> dict[str, Any]:
    """Return unchecked option values by name (with `_`), in the order of the file."""
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise ConfigError(
            f"the configuration file {path} is read by its ending, which must be "
            f"{', '.join(_PARSERS)}; rename it"
        )
    return _collect(path, parse(path, _text_of(path)))


def called(path: Path, key: str) -> str:
    """Return the name of a key for messages: in one line, and cut at a colon. If no space follows
    the colon, YAML treats the value, which may be a secret, as part of the key."""
    return f"{format_name(key.partition(':')[0][:MAX_KEY_CHARACTERS])} of {path}"


def read_ordinary(path: Path, most_bytes: int) -> bytes:
    """Read the first `most_bytes` of a file. Raises OSError, also if it is not a regular file,
    because opening a pipe could block for ever and a device has no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no ordinary file")
        with open(descriptor, "rb", closefd=False) as stream:
            return stream.read(most_bytes)
    finally:
        os.close(descriptor)


def _text_of(path: Path) -> str:
    try:
        data = read_ordinary(path, MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(
                f"the configuration file {path} has more than {MAX_BYTES // 1024} KiB, and options "
                "take much less; is it another file?"
            )
        return data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"the configuration file {path} cannot be read ({error.strerror})"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the configuration file {path} is no UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from error


def _collect(path: Path, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for key, value in pairs:
        name = key.replace("-", "_")
        shown = called(path, key)
        if name in given:
            raise ConfigError(f"{shown} stands there twice (- and _ are the same); keep one")
        if value is None:
            raise ConfigError(f"{shown} has no value; give one or leave the key out")
        given[name] = value
    return given


def _refuse_nested(path: Path, key: str) -> ConfigError:
    return ConfigError(
        f"{called(path, key)} holds a table or nested lists, and the file is "
        "flat: one `option: value` a line, without sections"
    )


def _parse_toml(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} holds a number too long to read; correct it") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deep; the file is flat") from error
    for key, value in table.items():
        items = value if isinstance(value, list) else (value,)
        if any(isinstance(item, dict | list) for item in items):
            raise _refuse_nested(path, key)
        yield key, value


def _parse_yaml(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield keys and values from YAML nodes, since a dict would hide duplicate keys and nesting."""
    import yaml

    try:
        # yaml.safe_load would silently keep the last of two equal keys.
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        # PyYAML's own text quotes the file, which may have secrets.
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        problem = _QUOTED.sub("", error.problem or "it cannot be read")
        raise ConfigError(f"{path} is no YAML: {line}{problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: it holds a character that may not be") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deep; the file is flat") from error
    if root is None or root.tag == _NULL:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path} is no list of options; write one `option: value` a line")
    for key_node, node in root.value:
        items = node.value if isinstance(node, yaml.SequenceNode) else (node,)
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a key"
        if not all(isinstance(item, yaml.ScalarNode) for item in (key_node, *items)):
            raise _refuse_nested(path, key)
        try:
            yield key, loader.construct_object(node, deep=True)
        except Exception as error:  # any error of a value that does not fit its tag
            line = f"line {node.start_mark.line + 1}"
            raise ConfigError(
                f"{called(path, key)} ({line}) is no plain value; put a text in quotes"
            ) from error


_PARSERS: Mapping[str, Callable[[Path, str], Iterator[tuple[str, Any]]]] = {
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".toml": _parse_toml,
}
