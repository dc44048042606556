# SPDX-License-Identifier: Apache-2.0
"""Whole networks of the compiled library against loops of torch in float64, in every variant that
runs here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stratakv.kernels.cpu import library as cpu
from stratakv.kernels.cpu import matrix, network, paged_attention
from stratakv.kernels.cpu.matrix import GELU_TANH, SILU, PackedMatrix
from stratakv.kernels.cpu.network import (
    MAX_VIEWS,
    CpuNetwork,
    NetworkExperts,
    NetworkLayer,
    last_rows,
)
from stratakv.kernels.cpu.paged_attention import CpuAttentionStep
from stratakv.kernels.cpu.thresholds import Worth
from stratakv.kernels.cpu.workspace import Workspace
from stratakv.kernels.kernel_choice import KernelRefused

from .cpu_variants import DTYPES, NEAR, PATH, draw, threads, variant

__all__ = ["threads", "variant"]  # fixtures

pytestmark = pytest.mark.usefixtures("variant")

LAYERS, HEADS, KV_HEADS, DIM, BLOCK, POSITIONS = 3, 4, 2, 16, 4, 200
TURNING, QUERIES = HEADS + KV_HEADS, HEADS * DIM


@dataclass
class Model:
    """A network with every part, as the library has it and by definition; of two views the second
    sees 5 tokens. Where there are experts, layers but for the second have them."""

    dtype: torch.dtype
    activation: int
    has_all: bool  # biases, norms of heads and norms behind; weights of experts that are 1 together
    experts: int = 0
    hidden: int = 40
    inner: int = 72
    layers: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        hidden, inner, dtype = self.hidden, self.inner, self.dtype
        shapes = {
            "qkv": ((TURNING + KV_HEADS) * DIM, hidden), "out": (hidden, QUERIES),
            "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner),
        }  # fmt: skip
        for number in range(LAYERS):
            made = {
                name: draw(*shape, dtype=dtype, seed=9 * number + place, spread=shape[1] ** -0.5)
                for place, (name, shape) in enumerate(shapes.items())
            }
            made |= {f"{name}_bias": draw(shape[0], dtype=dtype) for name, shape in shapes.items()}
            for name in ("attention_norm", "after_attention_norm", "mlp_norm", "after_mlp_norm"):
                made[name] = 1 + draw(hidden, dtype=dtype, seed=number, spread=0.1)
            size, of_router = 24, 3 * hidden**-0.5
            for expert in range(self.experts):
                for place, name in enumerate(("gate", "up", "down")):
                    shape = (hidden, size) if name == "down" else (size, hidden)
                    made[f"{name}{expert}"] = draw(
                        *shape, dtype=dtype, seed=99 * number + 3 * expert + place,
                        spread=shape[1] ** -0.5,
                    )  # fmt: skip
            made["router"] = draw(self.experts + 1, hidden, dtype=dtype, spread=of_router)
            made["head_norms"] = 1 + draw(TURNING, DIM, dtype=dtype, seed=number, spread=0.1)
            self.layers.append(made)
        self.last_norm = 1 + draw(hidden, dtype=dtype, spread=0.1)
        angles = torch.arange(POSITIONS)[:, None] * torch.rand(DIM // 2, dtype=torch.float64)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.pool = torch.full((60, LAYERS, 2, BLOCK, KV_HEADS, DIM), torch.nan).to(dtype)

    @property
    def num_chosen(self) -> int:
        """Experts of a row: all in 16 bits, whose rounding decides between two that score alike."""
        return 2 if self.dtype in (torch.float32, torch.float64) else self.experts

    def part(self, layer: int, name: str) -> Tensor | None:
        is_optional = name.endswith("bias") or name.startswith(("after", "head"))
        return self.layers[layer][name] if self.has_all or not is_optional else None

    def in_library(self) -> CpuNetwork:
        made = []
        for number, weights in enumerate(self.layers):

            def packed(*names: str, number: int = number) -> PackedMatrix:
                biases = tuple(self.part(number, f"{name}_bias") for name in names)
                matrices = tuple(self.layers[number][name] for name in names)
                return PackedMatrix(matrices, biases, self.activation)  # type: ignore[arg-type]

            gate_up: PackedMatrix | None = packed("gate", "up")
            down: PackedMatrix | None = packed("down")
            mixture = None
            if self.experts and number != 1:
                numbers, router = range(self.experts), weights["router"]
                mixture = NetworkExperts(
                    PackedMatrix((router if self.has_all else router[:-1],)),
                    [PackedMatrix((weights[f"gate{e}"], weights[f"up{e}"]), (None, None),
                                  self.activation) for e in numbers],
                    [PackedMatrix((weights[f"down{e}"],)) for e in numbers],
                    self.num_chosen, self.has_all,
                )  # fmt: skip
                if not self.has_all:
                    gate_up = down = None
            made.append(
                NetworkLayer(
                    packed("qkv"), packed("out"), gate_up, down,
                    weights["attention_norm"], self.part(number, "head_norms"),
                    self.part(number, "after_attention_norm"), weights["mlp_norm"],
                    self.part(number, "after_mlp_norm"), self.cos, self.sin, self.pool[:, number],
                    view=number % 2, experts=mixture,
                )
            )  # fmt: skip
        return CpuNetwork(
            made, self.last_norm, num_heads=HEADS, eps=1e-5, activation=self.activation
        )

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight.double()

    def by_definition(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """One request from its first token on: its hidden states, and those before each layer."""
        x, states, count = x.double(), [], len(x)
        cos, sin = self.cos[:count, None].double(), self.sin[:count, None].double()
        places = torch.arange(count)
        for number, weights in enumerate(self.layers):
            states.append(x)

            def linear(x: Tensor, name: str, number: int = number) -> Tensor:
                bias = self.part(number, f"{name}_bias")
                return F.linear(
                    x, self.layers[number][name].double(), None if bias is None else bias.double()
                )

            heads = linear(self.norm(x, weights["attention_norm"]), "qkv").view(count, -1, DIM)
            turned = heads[:, :TURNING]
            if (norms := self.part(number, "head_norms")) is not None:
                turned = self.norm(turned, norms)
            left, right = turned.chunk(2, -1)
            turned = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
            q, k = turned[:, :HEADS], turned[:, HEADS:].repeat_interleave(HEADS // KV_HEADS, 1)
            v = heads[:, TURNING:].repeat_interleave(HEADS // KV_HEADS, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) * 0.25
            hides = places[None] > places[:, None]
            if number % 2:
                hides = hides | (places[None] <= places[:, None] - 5)
            weighed = scores.masked_fill(hides, -torch.inf).softmax(-1)
            added = linear(torch.einsum("hqk,khd->qhd", weighed, v).reshape(count, -1), "out")
            if (after := self.part(number, "after_attention_norm")) is not None:
                added = self.norm(added, after)
            x = x + added
            normed = self.norm(x, weights["mlp_norm"])
            if self.experts and number != 1:
                added = self.mixture(number, normed, linear)
            else:
                added = self.gated(linear, normed)
            if (after := self.part(number, "after_mlp_norm")) is not None:
                added = self.norm(added, after)
            x = x + added
        return self.norm(x, self.last_norm), [*states, x]

    def gated(self, linear: Callable[[Tensor, str], Tensor], x: Tensor, of: object = "") -> Tensor:
        gate = linear(x, f"gate{of}")
        act = F.silu(gate) if self.activation == SILU else F.gelu(gate, approximate="tanh")
        return linear(act * linear(x, f"up{of}"), f"down{of}")

    def mixture(self, number: int, x: Tensor, linear: Callable[[Tensor, str], Tensor]) -> Tensor:
        def of_expert(x: Tensor, name: str) -> Tensor:
            return F.linear(x, self.layers[number][name].double())

        scores = of_expert(x, "router")
        shares, chosen = scores[:, :-1].softmax(-1).topk(self.num_chosen)
        if self.has_all:
            shares = shares / shares.sum(-1, keepdim=True)
        by_expert = torch.zeros_like(scores[:, :-1]).scatter_(1, chosen, shares)
        added = torch.zeros_like(x)
        for expert in range(self.experts):
            added += by_expert[:, expert, None] * self.gated(of_expert, x, expert)
        if self.has_all:
            added += scores[:, -1:].sigmoid() * self.gated(linear, x)
        return added

    def steps(
        self, before: list[int], counts: list[int], shared: int = 0
    ) -> list[CpuAttentionStep]:
        """Requests with so many tokens there and to compute; each has 15 blocks, of which the
        first `shared` are those of the first request."""
        tables = torch.arange(15 * len(counts)).flip(0).view(len(counts), 15).int()
        tables[:, :shared] = tables[0, :shared]
        slots = [
            int(tables[row, place // BLOCK]) * BLOCK + place % BLOCK
            for row, (begin, count) in enumerate(zip(before, counts, strict=True))
            for place in range(begin, begin + count)
        ]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        lengths = (torch.tensor(before) + torch.tensor(counts)).int()
        return [
            CpuAttentionStep(
                self.pool[:, 0], tables, lengths, starts, num_tokens=len(slots), num_heads=HEADS,
                scale=0.25, workspace=None, window=window, slots=torch.tensor(slots),
            )
            for window in (None, 5)
        ]  # fmt: skip

    def positions(self, before: list[int], counts: list[int]) -> Tensor:
        pairs = zip(before, counts, strict=True)
        return torch.cat([torch.arange(begin, begin + count) for begin, count in pairs])


@pytest.mark.parametrize(
    ("file", "name", "ours"),
    [("context.h", "FEW_VECTORS", network._FEW_VECTORS), ("network.h", "MOST_VIEWS", MAX_VIEWS)],
)
def test_numbers_of_the_library_are_the_same_in_python(file: str, name: str, ours: int) -> None:
    text = Path(network.__file__).with_name(file).read_text()
    assert re.findall(rf"constexpr int64_t {name} = (\d+);", text) == [str(ours)]


LENGTHS = [50, 21, 2]
OPTIONS = [(SILU, True, 0), (GELU_TANH, False, 0), (SILU, True, 6), (GELU_TANH, False, 6)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "has_all", "experts"), OPTIONS)
def test_a_network_is_right_in_chunks_and_token_by_token(
    threads: None, dtype: torch.dtype, activation: int, has_all: bool, experts: int
) -> None:
    """All but the last token of three requests in one step, then the last ones, wanted among
    others, none of them, and several times; states between layers come from the same work."""
    model = Model(dtype, activation, has_all, experts)
    run = model.in_library().run
    inputs = [draw(count, model.hidden, dtype=dtype, seed=count) for count in LENGTHS]
    expected = [model.by_definition(x) for x in inputs]
    near = {"rtol": NEAR[dtype], "atol": NEAR[dtype]}
    before, counts = [0, 0, 0], [count - 1 for count in LENGTHS]
    x = torch.cat([each[:-1] for each in inputs])
    nothing = torch.empty(0, dtype=torch.int64)
    given = (x, model.positions(before, counts), model.steps(before, counts))
    hidden, _ = run(*given, nothing)
    assert hidden.shape == (0, model.hidden)
    hidden, _ = run(*given, None)
    torch.testing.assert_close(hidden.double(), torch.cat([e[0][:-1] for e in expected]), **near)
    before, counts = counts, [1, 1, 1]
    x = torch.stack([each[-1] for each in inputs])
    wanted = torch.tensor([2, 0, 0, 1, 2, 2])
    given = (x, model.positions(before, counts), model.steps(before, counts))
    hidden, found = run(*given, wanted, (0, 2, LAYERS))
    last = torch.stack([states[-1] for states, _ in expected])
    torch.testing.assert_close(hidden.double(), last[wanted], **near)
    for layer in (0, 2):
        between = torch.stack([states[layer][-1] for _, states in expected])
        torch.testing.assert_close(found[layer].double(), between, **near)
    normed = model.norm(found[LAYERS].double(), model.last_norm)
    torch.testing.assert_close(hidden.double(), normed, **near)


@pytest.mark.parametrize("dtype", DTYPES)
def test_contexts_of_several_parts_are_right_in_every_layer_where_requests_share_them_too(
    monkeypatch: pytest.MonkeyPatch, threads: None, dtype: torch.dtype
) -> None:
    monkeypatch.setitem(globals(), "BLOCK", 64)
    monkeypatch.setitem(globals(), "POSITIONS", 700)
    model, alike, counts = Model(dtype, SILU, True), 512, [600, 540, 530]
    run = model.in_library().run
    inputs = [draw(count, model.hidden, dtype=dtype, seed=count) for count in counts]
    for other in inputs[1:]:
        other[:alike] = inputs[0][:alike]
    before = [0, alike, alike]  # the first request computes what all of them begin with
    for done in ([599, 539, 529], counts):
        taken = [end - begin for begin, end in zip(before, done, strict=True)]
        parts = zip(inputs, before, done, strict=True)
        x = torch.cat([each[begin:end] for each, begin, end in parts])
        steps = model.steps(before, taken, shared=alike // 64)
        hidden, _ = run(x, model.positions(before, taken), steps, None)
        before = done
    expected = torch.stack([model.by_definition(x)[0][-1] for x in inputs])
    torch.testing.assert_close(hidden.double(), expected, rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "has_all", "experts"), OPTIONS)
def test_rows_that_nobody_reads_have_keys_and_values_only(
    threads: None, dtype: torch.dtype, activation: int, has_all: bool, experts: int
) -> None:
    """Of four prompts one is read twice at its end, one from the middle on, one not at all."""
    model = Model(dtype, activation, has_all, experts)
    run = model.in_library().run
    counts = [50, 21, 2, 33]
    inputs = [draw(count, model.hidden, dtype=dtype, seed=count) for count in counts]
    x, none = torch.cat(inputs), [0] * len(counts)
    for wanted in ([70, 49, 99, 105, 49, 97], [105], [0, 105], [105, 0, 50, 72]):
        given = (x, model.positions(none, counts), model.steps(none, counts))
        model.pool.zero_()
        everything, _ = run(*given, None)
        written = model.pool.clone()
        model.pool.zero_()
        hidden, found = run(*given, torch.tensor(wanted), (LAYERS,))
        assert torch.equal(model.pool, written)
        near = {"rtol": NEAR[dtype], "atol": NEAR[dtype]}
        torch.testing.assert_close(hidden.double(), everything[wanted].double(), **near)
        normed = model.norm(found[LAYERS].double(), model.last_norm)
        torch.testing.assert_close(hidden.double(), normed, **near)


@pytest.mark.parametrize(
    ("wanted", "rows", "places"),
    [
        ([9, 4], [4, 5, 9], [2, 0]),
        ([], [], []),
        ([5, 5], [5], [0, 0]),
        ([0], None, None),  # most of the rows
    ],
)
def test_a_request_is_read_from_its_first_wanted_row_on(
    wanted: list[int], rows: list[int] | None, places: list[int] | None
) -> None:
    step = Model(torch.float32, SILU, False).steps([0, 3, 0], [6, 0, 4])[0]
    found = last_rows(step, torch.tensor(wanted, dtype=torch.int64))
    assert (found is None) == (rows is None)
    if found is not None:
        assert (found.rows.tolist(), found.wanted.tolist()) == (rows, places)
        assert found.step.num_tokens == len(found.rows) == found.starts[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", [0, 6])
@pytest.mark.parametrize(("layers", "rows"), [(3, 16), (3, 17), (2, 14)])
def test_a_prompts_last_row_has_the_same_bits_whatever_others_want(
    monkeypatch: pytest.MonkeyPatch, layers: int, rows: int, experts: int, dtype: torch.dtype
) -> None:
    """All rows of 17 would be attended to as many and the one that is read as few; of fewer in
    a window, which the last of two layers has, keys would begin elsewhere."""
    monkeypatch.setitem(globals(), "LAYERS", layers)
    model = Model(dtype, SILU, True, experts)
    run, x = model.in_library().run, draw(40, model.hidden, dtype=dtype, seed=2)

    def last_beside(count: int, wanted: list[int]) -> Tensor:
        counts = [rows, count] if count else [rows]
        none = [0] * len(counts)
        given = (x[: sum(counts)], model.positions(none, counts), model.steps(none, counts))
        return run(*given, torch.tensor([rows - 1, *(rows + row for row in wanted)]))[0][0]

    alone = last_beside(0, [])
    assert torch.equal(alone, last_beside(rows - 1, [rows - 2]))
    assert torch.equal(alone, last_beside(rows - 1, list(range(rows - 1))))
    assert torch.equal(alone, last_beside(2, [0, 1] * 10))


@pytest.mark.parametrize("experts", [0, 6])
def test_several_threads_compute_the_bits_of_one(
    experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enough work that more than one thread is used where there are more, and as soon as there is
    anything to do."""
    model = Model(torch.float32, SILU, True, experts, hidden=200, inner=600)
    before = torch.get_num_threads()
    x, counts = draw(174, 200, dtype=torch.float32), [58, 58, 58]
    given = (x, model.positions([0, 0, 0], counts), model.steps([0, 0, 0], counts))
    found = []
    try:
        for threads, worth in ((1, Worth()), (2, Worth()), (3, Worth()), (2, Worth(1, 1, 1))):
            monkeypatch.setattr(network, "worth_a_thread", lambda worth=worth: worth)
            run = model.in_library().run
            torch.set_num_threads(threads)
            found += [run(*given, None)[0], run(*given, torch.tensor([57, 57, 3]))[0]]
            assert len(run(*given, torch.empty(0, dtype=torch.int64))[0]) == 0
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0][[57, 57, 3]], found[1])
    assert all(torch.equal(found[place % 2], other) for place, other in enumerate(found))


def test_a_pass_without_openmp_stays_within_the_memory_that_was_measured(
    monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """One thread does all of what was laid down for several, each of which needs less."""
    monkeypatch.setitem(globals(), "BLOCK", 64)
    monkeypatch.setitem(globals(), "POSITIONS", 256)
    monkeypatch.setattr(cpu, "_torch_parallel", lambda: None)
    alone = cpu.open_library(PATH, variant)
    for module in (matrix, network, paged_attention):
        monkeypatch.setattr(module, "cpu_library", lambda: alone)
        monkeypatch.setattr(module, "worth_a_thread", lambda: Worth(1, 1, 1))
    model, count = Model(torch.float32, SILU, True), 50
    model.pool.copy_(draw(*model.pool.shape, dtype=torch.float32))
    steps = [
        CpuAttentionStep(
            model.pool[:, 0], torch.arange(4).int().repeat(count, 1),
            torch.full((count,), 256).int(), None, num_tokens=count, num_heads=HEADS, scale=0.25,
            workspace=None, window=window, slots=torch.full((count,), -1),
        )
        for window in (None, 5)
    ]  # fmt: skip
    x, behind, found = draw(count, model.hidden, dtype=torch.float32), 1 << 19, []

    def guarded(_: Workspace, num_bytes: int) -> Tensor:
        memory.append(torch.full((num_bytes + behind,), 9, dtype=torch.uint8))
        return memory[-1][:num_bytes]

    monkeypatch.setattr(Workspace, "at_least", guarded)
    run, before = model.in_library().run, torch.get_num_threads()
    try:
        for threads in (1, 2):
            memory: list[Tensor] = []
            torch.set_num_threads(threads)
            found.append(run(x, torch.full((count,), 255), steps, None)[0])
            assert bool((memory[-1][-behind:] == 9).all())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [48, 80])
def test_heads_that_fill_no_whole_panels_are_computed_together(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, dim: int
) -> None:
    """Five heads, the last of which is alone, in several parts of a matrix and blocks of rows."""
    shape = {"HEADS": 3, "KV_HEADS": 1, "DIM": dim, "TURNING": 4, "QUERIES": 3 * dim}
    for name, value in shape.items():
        monkeypatch.setitem(globals(), name, value)
    model, counts = Model(dtype, SILU, True, hidden=400), [51, 49]
    inputs = [draw(count, model.hidden, dtype=dtype, seed=count) for count in counts]
    steps, positions = model.steps([0, 0], counts), model.positions([0, 0], counts)
    hidden, _ = model.in_library().run(torch.cat(inputs), positions, steps, None)
    expected = torch.cat([model.by_definition(x)[0] for x in inputs])
    torch.testing.assert_close(hidden.double(), expected, rtol=NEAR[dtype], atol=NEAR[dtype])


def test_a_layers_norm_may_be_the_last_one_too() -> None:
    model, x = Model(torch.float32, SILU, False), draw(5, 40, dtype=torch.float32)
    for weights in model.layers:
        weights["attention_norm"] = weights["mlp_norm"] = model.last_norm
    given = (x, model.positions([0], [5]), model.steps([0], [5]))
    hidden, _ = model.in_library().run(*given, None)
    torch.testing.assert_close(hidden.double(), model.by_definition(x)[0], rtol=2e-5, atol=2e-5)


def test_what_is_out_of_bounds_is_refused() -> None:
    model = Model(torch.float32, SILU, False)
    run, steps = model.in_library().run, model.steps([0], [2])
    x, places = torch.zeros(2, model.hidden), torch.tensor([0, 1])
    for positions in (torch.tensor([0, POSITIONS]), torch.tensor([-1, 0])):
        with pytest.raises(ValueError, match="positions that the tables have"):
            run(x, positions, steps, None)
    for wanted in (torch.tensor([2]), torch.tensor([-1])):
        with pytest.raises(ValueError, match="wanted rows among the tokens"):
            run(x, places, steps, wanted)
    with pytest.raises(ValueError, match=r"\[tokens, 40\] and 2 steps"):
        run(x, places, steps[:1], None)
    for name, given in (("positions", (places.int(), steps, None)),
                        ("positions", (places[:1], steps, None)),
                        ("wanted", (places, steps, places.int()))):  # fmt: skip
        with pytest.raises(ValueError, match=f"expected {name} of torch.int64"):
            run(x, *given)
    for state in (-1, LAYERS + 1):
        with pytest.raises(ValueError, match="expected states from 0 to"):
            run(x, places, steps, torch.zeros(9, dtype=torch.int64), [state])


@pytest.mark.parametrize("what", ["tokens", "slots", "heads", "pool", "strides"])
def test_steps_that_were_laid_down_for_something_else_are_refused(what: str) -> None:
    """The library would read, and write, where there is nothing of the kind."""
    model = Model(torch.float32, SILU, False)
    pool = model.pool[:, 0]
    others: dict[str, dict[str, object]] = {
        "tokens": {"num_tokens": 200, "slots": torch.arange(200)},
        "slots": {"slots": None},
        "heads": {"num_heads": 2 * HEADS},
        "pool": {"pool": pool.new_zeros(500, *pool.shape[1:])},
        "strides": {"pool": pool.contiguous()},
    }
    given = {
        "pool": pool, "block_tables": torch.zeros(1, 1).int(), "seq_lens": torch.tensor([2]).int(),
        "query_starts": torch.tensor([0, 2]).int(), "num_tokens": 2, "num_heads": HEADS,
        "slots": torch.tensor([0, 1]), "scale": 0.25, "workspace": None,
    }  # fmt: skip
    step = CpuAttentionStep(**{**given, **others[what]})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="laid down over this pool"):
        model.in_library().run(torch.zeros(2, model.hidden), torch.tensor([0, 1]), [step] * 2, None)


def test_matrices_of_another_model_are_refused() -> None:
    model = Model(torch.float32, SILU, False)
    model.layers[1]["down"] = torch.zeros(model.hidden, 8)
    with pytest.raises(KernelRefused, match="expected matrices"):
        model.in_library()


def test_experts_are_told_of_all_rows_alone() -> None:
    model = Model(torch.float32, SILU, True, 6)
    run, x = model.in_library().run, draw(4, model.hidden, dtype=torch.float32)
    given = (x, model.positions([0], [4]), model.steps([0], [4]))
    chosen = torch.full((2, 5, 2), -1, dtype=torch.int32)
    hidden, _ = run(*given, None, chosen=chosen)
    assert torch.equal(hidden, run(*given, None)[0])
    assert (chosen[:, :4] >= 0).all() and (chosen[:, :4] < 6).all() and (chosen[:, 4] == -1).all()
    assert (chosen[:, :4, 0] != chosen[:, :4, 1]).all()
    for wrong in (chosen[:, :3], chosen[:1], chosen[..., :1], chosen.long()):
        with pytest.raises(ValueError, match=r"expected int32 \[2, 4 or more, 2\] for the experts"):
            run(*given, None, chosen=wrong)
    with pytest.raises(ValueError, match="and some rows"):
        run(*given, torch.tensor([1]), chosen=chosen)


def test_experts_that_do_not_fit_are_refused() -> None:
    model = Model(torch.float32, SILU, True, 6)
    layer = model.in_library()._kept[0]
    assert isinstance(layer, NetworkLayer) and layer.experts is not None

    def network_of(experts: NetworkExperts) -> None:
        CpuNetwork([replace(layer, experts=experts)], model.last_norm, num_heads=HEADS, eps=1e-5)

    network_of(layer.experts)
    for wrong in (
        replace(layer.experts, num_chosen=7),
        replace(layer.experts, num_chosen=0),
        replace(layer.experts, gate_ups=layer.experts.gate_ups[:5]),
        replace(layer.experts, router=layer.experts.downs[0]),
        replace(layer.experts, downs=[*layer.experts.downs[:5], layer.qkv]),
    ):
        with pytest.raises(KernelRefused, match="expected"):
            network_of(wrong)


def test_an_activation_that_the_library_lacks_is_refused() -> None:
    """The library takes every number but one for SiLU."""
    gate, up = torch.ones(8, 8), torch.ones(8, 8)
    with pytest.raises(ValueError, match="expected activation 0 or 1, got 2"):
        PackedMatrix((gate, up), (None, None), 2)
