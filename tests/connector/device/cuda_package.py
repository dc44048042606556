# SPDX-License-Identifier: Apache-2.0
"""Where the CUDA runtime's own library and headers are, on a machine without a GPU.

They come with `pip install nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88`, 2.4 MB, which
need no driver to be loaded and read. STRATAKV_CUDA_INCLUDE names another folder of headers.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

HOW_TO_GET = (
    "the CUDA runtime is not installed; "
    "`pip install --no-deps nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88` brings it"
)


def _folders() -> list[Path]:
    """`nvidia/cu13`, wherever packages lie."""
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    return [folder for place in places for folder in sorted(Path(place).glob("cu1[0-9]"))]


def find_include() -> Path | None:
    """The folder with headers that a compiler can read, None without."""
    named = os.environ.get("STRATAKV_CUDA_INCLUDE")
    for folder in [Path(named)] if named else [each / "include" for each in _folders()]:
        if (folder / "cuda_runtime_api.h").exists() and (folder / "crt/host_defines.h").exists():
            return folder
    return None


def find_library() -> Path | None:
    """The runtime's library, None without."""
    for folder in _folders():
        for path in sorted(folder.glob("lib/libcudart.so.*")):
            return path
    return None


def version_of(include: Path) -> int:
    """CUDART_VERSION, 13000 for 13.0."""
    header = (include / "cuda_runtime_api.h").read_text()
    match = re.search(r"#define CUDART_VERSION\s+(\d+)", header)
    assert match is not None
    return int(match[1])
