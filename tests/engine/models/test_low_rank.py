# SPDX-License-Identifier: Apache-2.0
"""Products with adapters equal products with merged matrices, in every form that a matrix has: each
variant of the compiled library, torch's, and the grouped products of experts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from stratakv.engine.models.checkpoint.weights import DenseWeights, ExpertWeights
from stratakv.engine.models.dtypes import dtype_name
from stratakv.engine.models.experts import ExpertMlp
from stratakv.engine.models.families import Activation
from stratakv.engine.models.layer import Layer
from stratakv.engine.models.layers import DenseMlp, Elementwise, Linear
from stratakv.engine.models.lora.adapter_file import AdapterFile
from stratakv.engine.models.lora.layer_adapters import layer_adapters
from stratakv.engine.models.lora.low_rank import Adaptable, LowRank, Target
from stratakv.engine.models.lora.row_slots import NO_SLOT, RowSlots
from stratakv.engine.models.spec.expert_spec import ExpertSpec
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.kernels.cpu import matrix, network, paged_attention
from stratakv.kernels.cpu.library import VARIANTS, Missing, open_library
from stratakv.kernels.cpu.thresholds import Worth

from ...kernels.cpu_variants import NEAR, PATH, draw, threads
from ...peft_adapters import AdapterFolders, peft_logits
from ...test_lora_requests import answers_of, check_logprobs

__all__ = ["threads"]  # a fixture

OUTS, INS, SLOTS = 83, 45, 5
RANKS = [3, 8, 17, 1]  # of the adapters in the first slots; the last slot is empty
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.fixture(params=[*VARIANTS, "none"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A variant of the library, or torch's products."""
    found = open_library(PATH, request.param)
    if isinstance(found, Missing) and request.param != "none":
        pytest.skip(found.reason)
    for module in (matrix, network, paged_attention):
        monkeypatch.setattr(module, "cpu_library", lambda: found)
        monkeypatch.setattr(module, "worth_a_thread", Worth)
    return str(request.param)


def adapters(dtype: torch.dtype, parts: int = 1, outs: int = OUTS, ins: int = INS) -> list[LowRank]:
    """The first has zeros behind its tenth output and ranks, as where modules are joined."""
    made = []
    for slot, rank in enumerate(RANKS):
        each = [draw(outs, rank, dtype=dtype, seed=70 + slot + 9 * p) for p in range(parts)]
        if slot == 0:
            for out in each:
                out[10:] = 0
        a = draw(rank, ins, dtype=dtype, seed=slot, spread=(rank * ins) ** -0.5)
        made.append(LowRank(a, tuple(each)))
    return made


def put(product: Adaptable, rows: RowSlots, given: Sequence[LowRank]) -> None:
    product.allow_adapters(rows, max(RANKS))
    for slot, adapter in enumerate(given):
        product.put_adapter(slot, product.prepare_adapter(adapter))


def slots_of(count: int) -> Tensor:
    """Rows of all slots and without one, mixed."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(NO_SLOT, SLOTS, (count,), generator=generator).int()


def added_by(given: Sequence[LowRank], slots: Tensor, x: Tensor, part: int = 0) -> Tensor:
    """Compute what the adapters add to each row, by definition."""
    outs = len(given[0].outs[part])
    added = torch.zeros(len(x), outs, dtype=torch.float64)
    for row, slot in enumerate(slots.tolist()):
        if 0 <= slot < len(given):
            low = given[slot]
            added[row] = x[row].double() @ low.ins.double().T @ low.outs[part].double().T
    return added


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_maps(form: str, threads: None, dtype: torch.dtype) -> None:
    weight = draw(OUTS, INS, dtype=dtype, spread=INS**-0.5)
    bias, rows, given = draw(OUTS, dtype=dtype), RowSlots(SLOTS), adapters(dtype)
    linear, near = Linear(weight, bias), {"rtol": NEAR[dtype], "atol": 4 * NEAR[dtype]}
    assert (linear.packed is None) == (form == "none")
    x = draw(200, INS, dtype=dtype)
    plain = linear(x)
    put(linear, rows, given)
    assert torch.equal(linear(x), plain), "no row has an adapter"
    for count in (0, 1, 2, 7, 33, 200):
        slots = slots_of(count)
        with rows.replaced(slots):
            found = linear(x[:count])
            to_ones = torch.ones_like(found)
            linear.add_to(to_ones, x[:count])
            alone = linear(x[:1]) if count == 1 else None
        base = F.linear(x[:count].double(), weight.double(), bias.double())
        expected = base + added_by(given, slots, x[:count])
        torch.testing.assert_close(found.double(), expected, **near)
        torch.testing.assert_close(to_ones.double(), expected + 1, **near)
        if form != "none":
            without = slots < 0
            assert torch.equal(found[without], plain[:count][without])
        assert alone is None or torch.equal(alone, found)
    with rows.replaced(slots_of(200)):
        before = linear(x)
        linear.put_adapter(1, None)
        after = linear(x)
    gone = slots_of(200) == 1
    assert torch.equal(after[~gone], before[~gone]) and not torch.equal(after[gone], before[gone])


@pytest.mark.parametrize("dtype", DTYPES)
def test_some_outputs_of_packed_matrices(form: str, dtype: torch.dtype) -> None:
    """Outputs that are not wanted are left out with what is added to them."""
    linear, rows = Linear(draw(OUTS, INS, dtype=dtype)), RowSlots(SLOTS)
    put(linear, rows, adapters(dtype))
    x, words = draw(9, INS, dtype=dtype), np.zeros(-(-OUTS // 32), np.uint32)
    chosen = [0, 5, 31, 32, 64, OUTS - 1]
    for place in chosen:
        words[place // 32] |= np.uint32(1 << place % 32)
    with rows.replaced(slots_of(9)):
        whole, some = linear(x, is_wide=True), linear(x, words, is_wide=True)
    assert torch.equal(whole[:, chosen], some[:, chosen])


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mlps(form: str, threads: None, dtype: torch.dtype, activation: Activation) -> None:
    """Gate and up are a pair of matrices with one product in the library."""
    hidden = INS
    gate, up = (draw(OUTS, hidden, dtype=dtype, seed=s, spread=hidden**-0.5) for s in (1, 2))
    down = draw(hidden, OUTS, dtype=dtype, seed=3, spread=OUTS**-0.5)
    mlp, rows = DenseMlp(DenseWeights(gate, up, down), activation, Elementwise()), RowSlots(SLOTS)
    assert (mlp.gate_up is None) == (form == "none")
    both, back = adapters(dtype, 2), adapters(dtype, 1, hidden, OUTS)
    products = mlp.adapted_products()
    put(products[Target.GATE_UP], rows, both)
    put(products[Target.DOWN], rows, back)
    act = F.silu if activation is Activation.SILU else lambda x: F.gelu(x, approximate="tanh")
    for count in (1, 5, 130):
        x, slots = draw(count, hidden, dtype=dtype, seed=count), slots_of(count)
        with rows.replaced(slots):
            found = mlp(x)
        left, right = (
            x.double() @ each.double().T + added_by(both, slots, x, part)
            for part, each in enumerate((gate, up))
        )
        inner = act(left) * right
        expected = inner @ down.double().T + added_by(back, slots, inner)
        scale = expected.abs().max().item()
        torch.testing.assert_close(
            found.double(), expected, rtol=NEAR[dtype], atol=NEAR[dtype] * max(1.0, scale)
        )


EXPERTS, CHOSEN, HIDDEN, SIZE = 6, 2, 48, 24


def expert_parts(dtype: torch.dtype) -> tuple[ExpertWeights, list[list[Tensor]]]:
    matrices = [
        [draw(SIZE, HIDDEN, dtype=dtype, seed=10 * e + k, spread=HIDDEN**-0.5) for k in (0, 1)]
        + [draw(HIDDEN, SIZE, dtype=dtype, seed=10 * e + 2, spread=SIZE**-0.5)]
        for e in range(EXPERTS)
    ]
    router = draw(EXPERTS, HIDDEN, dtype=dtype, seed=99)
    gates, ups, downs = (list(each) for each in zip(*matrices, strict=True))
    return ExpertWeights(router, gates, ups, downs), matrices


def expert_adapters(dtype: torch.dtype) -> list[dict[Target, LowRank]]:
    made = []
    for slot, rank in enumerate(RANKS[:3]):

        def several(outs: int, ins: int, seed: int) -> Tensor:
            spread = max(outs, ins) ** -0.5
            return draw(EXPERTS, outs, ins, dtype=dtype, seed=seed, spread=spread)

        gate, up, down = (
            several(size, rank, 7 * slot + number)
            for number, size in enumerate((SIZE, SIZE, HIDDEN))
        )
        made.append({
            Target.EXPERTS_GATE_UP: LowRank(several(rank, HIDDEN, 50 + slot), (gate, up)),
            Target.EXPERTS_DOWN: LowRank(several(rank, SIZE, 60 + slot), (down,)),
        })  # fmt: skip
    return made


def merged(dtype: torch.dtype, own: dict[Target, LowRank] | None) -> ExpertMlp:
    """Experts in float64 with one adapter inside their matrices."""
    weights, _ = expert_parts(dtype)
    wide = ExpertWeights(
        weights.router.double(),
        *([each.double() for each in group] for group in (weights.gates, weights.ups,
                                                          weights.downs)),
    )  # fmt: skip
    if own is not None:
        both, back = own[Target.EXPERTS_GATE_UP], own[Target.EXPERTS_DOWN]
        for number in range(EXPERTS):
            for group, low, part in ((wide.gates, both, 0), (wide.ups, both, 1),
                                     (wide.downs, back, 0)):  # fmt: skip
                group[number] += low.outs[part][number].double() @ low.ins[number].double()
    return ExpertMlp(ExpertSpec(EXPERTS, CHOSEN, SIZE, True, (0,), 0), wide, Activation.SILU,
                     Elementwise())  # fmt: skip


@pytest.mark.parametrize("has_not_a_number", [False, True])
@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts(dtype: torch.dtype, is_grouped: bool, has_not_a_number: bool) -> None:
    """Every row gets its own adapter with each of its experts, and numbers of no other adapter."""
    weights, _ = expert_parts(dtype)
    if is_grouped:
        weights.join_gate()
    spec = ExpertSpec(EXPERTS, CHOSEN, SIZE, True, (0,), 0)
    mlp = ExpertMlp(spec, weights, Activation.SILU, Elementwise(is_kernels=is_grouped))
    rows, given = RowSlots(3), expert_adapters(dtype)
    products = mlp.adapted_products()
    for target, product in products.items():
        product.allow_adapters(rows, 2 * max(RANKS))
        for slot, own in enumerate(given):
            low = own[target]
            if has_not_a_number and slot == 1:
                low = LowRank(torch.full_like(low.ins, torch.nan), low.outs)
            product.put_adapter(slot, product.prepare_adapter(low))
    x = draw(60, HIDDEN, dtype=dtype, seed=5)
    slots = torch.randint(NO_SLOT, 3, (60,), generator=torch.Generator().manual_seed(2)).int()
    with rows.replaced(slots):
        found = mlp(x)
    near = 1e-4 if dtype is torch.float32 else 0.1
    for slot in (NO_SLOT, 0, 1, 2):
        own = slots == slot
        if has_not_a_number and slot == 1:
            assert found[own].isnan().all()
            continue
        expected = merged(dtype, None if slot < 0 else given[slot])(x[own].double())
        torch.testing.assert_close(found[own].double(), expected, rtol=near, atol=near)


def test_modules_of_single_experts(peft_folders: AdapterFolders, tmp_path: Path) -> None:
    """Files in which experts have modules of their own, some of them none."""
    spec, rank = load_model_spec(peft_folders.base("qwen3_moe")), 3
    assert spec.experts is not None
    size, hidden = spec.experts.size, spec.hidden_size
    sizes = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
    matrices, expected = {}, {}
    for number, part in ((0, "gate"), (0, "up"), (0, "down"), (2, "up"), (3, "gate"), (3, "down")):
        outs, ins = sizes[part]
        seed = len(matrices)
        a = draw(rank, ins, dtype=torch.float64, seed=seed)
        b = draw(outs, rank, dtype=torch.float64, seed=seed + 1)
        name = f"base_model.model.model.layers.1.mlp.experts.{number}.{part}_proj"
        matrices |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        expected[number, part] = b @ a * 2.0
    save_file(matrices, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    first, second = layer_adapters(AdapterFile.read(tmp_path, spec, 8), spec, torch.float64)
    both, back = second[Target.EXPERTS_GATE_UP], second[Target.EXPERTS_DOWN]
    assert not first and len(second) == 2
    for number in range(spec.experts.num_experts):
        for part, low, place in (("gate", both, 0), ("up", both, 1), ("down", back, 0)):
            found = low.outs[place][number] @ low.ins[number]
            wanted = expected.get((number, part), torch.zeros_like(found))
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_none_reach_the_rows_of_their_adapter_alone(
    form: str, dtype: torch.dtype
) -> None:
    linear, rows = Linear(draw(OUTS, INS, dtype=dtype)), RowSlots(SLOTS)
    given = adapters(dtype)
    put(linear, rows, given)
    x, slots = draw(64, INS, dtype=dtype), slots_of(64)
    with rows.replaced(slots):
        before = linear(x)
        for value in (torch.nan, torch.inf):
            broken = LowRank(torch.full_like(given[2].ins, value), given[2].outs)
            linear.put_adapter(2, linear.prepare_adapter(broken))
            after = linear(x)
            own = slots == 2
            assert own.any() and not after[own].isfinite().any()
            assert torch.equal(after[~own], before[~own])


@pytest.fixture(params=["one call", "by layer"])
def is_whole(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether one call of the library computes all layers of a step."""
    if request.param == "by layer":
        monkeypatch.setattr(Layer, "in_library", lambda *_: None)
    return bool(request.param == "one call")


@pytest.mark.parametrize(
    ("base", "dtype"),
    # Not the experts in 16 bits, whose rounding decides between two that score alike.
    [*(("qwen3", dtype) for dtype in DTYPES), *(("qwen3_moe", dtype) for dtype in DTYPES[:2])],
)
def test_decoders(
    form: str, is_whole: bool, base: str, dtype: torch.dtype, peft_folders: AdapterFolders
) -> None:
    text, answers = answers_of(peft_folders, base, dtype_name(dtype))
    for name, answer in answers.items():
        adapter = peft_folders.adapter(name) if name else None
        if dtype is not torch.bfloat16:
            check_logprobs(peft_folders, base, adapter, text, answer, dtype)
            continue
        logits = peft_logits(
            peft_folders.base(base), adapter, [*text, *answer.token_ids[:-1]], dtype
        ).double()
        assert answer.prompt_logprobs is not None
        entries = [*answer.prompt_logprobs[1:], *answer.logprobs]
        for entry, row in zip(entries, logits, strict=True):
            expected = row.log_softmax(-1)[entry.token_ids]
            error = (expected - torch.tensor(entry.logprobs)).abs().max() / row.abs().max()
            assert error < 0.1
