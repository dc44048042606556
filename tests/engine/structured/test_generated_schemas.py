# SPDX-License-Identifier: Apache-2.0
"""Schemas by chance, models with random weights: every answer that ends by itself validates."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import jsonschema
import pytest

from stratakv.engine.llm import LLM
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.request.structured_params import StructuredOutputsParams

from .schemas import schema_of

logger = logging.getLogger(__name__)

EACH = {"ci": 20, "long": 400}


@pytest.mark.parametrize("backend", ["auto", "guidance"])
def test_every_answer_that_ends_validates(
    tiny_model: Path, backend: str, scale: str, seed: int
) -> None:
    count = EACH[scale]
    schemas = [schema_of(random.Random(seed * 1000 + number)) for number in range(count)]
    params = [
        SamplingParams(
            max_tokens=150,
            temperature=0.6 if number % 2 else 1.0,
            seed=number,
            structured_outputs=StructuredOutputsParams(
                json=schema, disable_any_whitespace=number % 4 != 0
            ),
        )
        for number, schema in enumerate(schemas)
    ]
    with LLM(
        tiny_model, structured_outputs_backend=backend, num_blocks=400, num_threads=1,
        max_num_seqs=32,
    ) as llm:  # fmt: skip
        outputs = llm.generate([f"{number}: " for number in range(count)], params)
        grammars = llm.stats()["grammar"]
    num_ended = 0
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.finish_reason in ("stop", "length"), (schema, output.error)
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), schema)
            num_ended += 1
    logger.info("%s: %d of %d answers ended by themselves", backend, num_ended, count)
    assert num_ended > count // 4
    assert grammars["failed"] == grammars["compile_failed"] == 0
