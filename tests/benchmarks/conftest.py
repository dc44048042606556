# SPDX-License-Identifier: Apache-2.0
"""A model for rehearsals, which show that a benchmark runs and what it writes, and not figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from stratakv.engine.config.engine_options import EMBEDDED_MODEL


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model without its layers but the first."""
    from safetensors.torch import load_file, save_file  # torch, which other rehearsals do without

    folder = tmp_path_factory.mktemp("models") / "one_layer"
    shutil.copytree(EMBEDDED_MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    kept = {
        name: weight
        for name, weight in weights.items()
        if "layers." not in name or "layers.0." in name
    }
    assert len(kept) < len(weights)
    (folder / "model.safetensors").unlink()
    save_file(kept, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return folder
