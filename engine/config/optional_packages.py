# SPDX-License-Identifier: Apache-2.0
"""Messages that name the optional extra of StrataKV which installs a missing package.

`_EXTRAS` has the import names of the packages that each extra in `pyproject.toml` installs."""

from __future__ import annotations

_EXTRAS = {
    "engine": (
        "PIL", "aiofiles", "fastapi", "h11", "huggingface_hub", "jinja2", "llguidance", "numpy",
        "pydantic", "rich", "safetensors", "starlette", "tokenizers", "torch", "uvicorn",
        "websockets", "yaml", "zmq",
    ),
    "grammar": ("tvm_ffi", "xgrammar"),
    "bench": ("matplotlib",),
    "cuda": ("cupy", "triton"),
    "test": ("transformers",),
}  # fmt: skip


def install_extra(extra: str) -> str:
    """Return the command that installs an extra from a clone; no package index has StrataKV."""
    return f"pip install '.[{extra}]'"


def explain_missing_module(error: ModuleNotFoundError) -> str:
    """Return a sentence that names the missing package and the command that installs it."""
    name = (error.name or "").partition(".")[0]
    for extra, packages in _EXTRAS.items():
        if name in packages:
            return (
                f"the package {name} is not installed and this needs it; "
                f"run in a clone of StrataKV: {install_extra(extra)}"
            )
    return f"the module {error.name} cannot be found ({error}); install StrataKV again"
