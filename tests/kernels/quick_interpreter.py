# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter, which spends a third of its time on work that it has done already.

Each call of a device function, `tl.sum` among them, replaces the whole language once more by the
interpreter's, and each array builds the table of numpy's types anew. After `install()` the language
is replaced once in a launch, and the table is kept. What a kernel computes stays the same.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction

_replaced: set[str] = set()  # the language's modules that this launch has replaced
_plain: dict[str, Any] = {}


def install() -> None:
    """Patch the interpreter of this process; a second call changes nothing."""
    if _plain:
        return
    for owner, name, quick in (
        (GridExecutor, "__call__", _launch),
        (InterpretedFunction, "__call__", _call),
        (triton_interpreter, "_get_np_dtype", _numpy_type),
    ):
        _plain[f"{owner.__name__}.{name}"] = getattr(owner, name)
        setattr(owner, name, quick)


def _launch(self: Any, *args: Any, **kwargs: Any) -> Any:
    _replaced.clear()
    try:
        return _plain["GridExecutor.__call__"](self, *args, **kwargs)
    finally:
        _replaced.clear()


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A device function is called by a kernel: as Triton does it, but for the replacement."""
    modules = _language_of(self.fn)
    if not modules <= _replaced:
        triton_interpreter._patch_lang(self.fn)
        _replaced.update(modules)
    function = self.rewrite()
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise triton_interpreter.InterpreterError(repr(error)) from error


@functools.cache
def _language_of(function: Any) -> frozenset[str]:
    """The modules of the language that this function sees."""
    seen = function.__globals__.values()
    return frozenset(
        each.__name__ for each in seen if inspect.ismodule(each) and each in (tl, tl.core)
    )


def _numpy_type(dtype: Any) -> Any:
    if isinstance(dtype, tl.block_type):
        dtype = dtype.element_ty
    if isinstance(dtype, tl.pointer_type):
        return _ADDRESS
    found = _types.get(dtype)
    if found is None:
        found = _types[dtype] = _plain["triton.runtime.interpreter._get_np_dtype"](dtype)
    return found


_ADDRESS = np.dtype(np.uint64)
_types: dict[Any, Any] = {}
