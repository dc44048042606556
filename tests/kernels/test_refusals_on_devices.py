# SPDX-License-Identifier: Apache-2.0
"""All kernels: what Triton's cannot do falls back with one line, or is refused when strict.

Tensors without memory stand in for those of devices that are not here, and the hardware is a value,
as in test_choice.py. What the plain twin then makes of them is not its business here: whether it is
reached is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stratakv.kernels import kernel_choice as choice
from stratakv.kernels import pool_checks
from stratakv.kernels.attention.paged_decode import paged_decode
from stratakv.kernels.attention.paged_prefill import paged_prefill
from stratakv.kernels.copy import copy_blocks
from stratakv.kernels.kernel_choice import AUTO, TRITON, Hardware, KernelRefused
from stratakv.kernels.pool_checks import FP8
from stratakv.kernels.write.write_kv import write_kv

H200 = Hardware("NVIDIA H200", (9, 0), True)
A100 = Hardware("NVIDIA A100", (8, 0), True)
V100 = Hardware("Tesla V100", (7, 0), True)


class Reached(Exception):
    """The plain twin was called."""


def decode(sizes: dict[str, Any], **wish: Any) -> None:
    t = tensors(**sizes)
    options = {"scale": 1.0, "kv_scales": t["kv_scales"], **wish}
    paged_decode(t["q"], t["kv"], t["tables"], t["lengths"], **options)


def prefill(sizes: dict[str, Any], **wish: Any) -> None:
    t = tensors(**sizes)
    options = {"max_query_len": 1, "scale": 1.0, "kv_scales": t["kv_scales"], **wish}
    paged_prefill(t["q"], t["kv"], t["tables"], t["lengths"], t["starts"], **options)


def write(sizes: dict[str, Any], **wish: Any) -> None:
    t = tensors(**sizes)
    write_kv(t["k"], t["k"], t["kv"], t["slots"], kv_scales=t["kv_scales"], **wish)


def copy(sizes: dict[str, Any], **wish: Any) -> None:
    t = tensors(**sizes)
    copy_blocks.copy_blocks(t["kv"], t["slots"], t["slots"], **wish)


def gather(sizes: dict[str, Any], **wish: Any) -> None:
    t = tensors(**sizes)
    copy_blocks.gather_blocks(t["kv"], t["slots"], t["rows"], **wish)


def scatter(sizes: dict[str, Any], **wish: Any) -> None:
    t = tensors(**sizes)
    copy_blocks.scatter_blocks(t["rows"], t["kv"], t["slots"], **wish)


def tensors(
    dtype: torch.dtype = torch.float16,
    pool_dtype: torch.dtype | None = None,
    head_dim: int = 64,
    heads: int = 4,
    strange: str = "",
    device: str = "cuda:0",
) -> dict[str, Any]:
    """Of two requests; `strange` is the one on another device."""

    def place(name: str) -> str:
        return "cpu" if name == strange else device

    def empty(name: str, *shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device=place(name))

    pool = pool_dtype or dtype
    return {
        "q": empty("q", 2, heads, head_dim),
        "k": empty("k", 2, 1, head_dim),
        "kv": empty("kv", 4, 2, 16, 1, head_dim, of=pool),
        "rows": empty("rows", 2, 2, 16, 1, head_dim, of=pool),
        "tables": empty("tables", 2, 3, of=torch.int32),
        "lengths": empty("lengths", 2, of=torch.int32),
        "starts": empty("starts", 3, of=torch.int32),
        "slots": empty("slots", 2, of=torch.int64),
        "kv_scales": empty("kv_scales", 2, 1, of=torch.float32) if pool == FP8 else None,
    }


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Hardware], None]:
    """No interpreter, nothing warned of yet, and plain twins that only say they were reached."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    choice._warn_once.cache_clear()

    def reached(*_: Any, **__: Any) -> None:
        raise Reached

    for twin in (
        "attention.paged_decode_plain.paged_decode_plain",
        "attention.paged_prefill_plain.paged_prefill_plain",
        "write.write_kv.write_kv_plain",
        "copy.copy_blocks.move_blocks_plain",
    ):
        monkeypatch.setattr(f"stratakv.kernels.{twin}", reached)
    # Asks where the memory is, which these tensors do not have.
    monkeypatch.setattr(copy_blocks, "_widest_word", lambda *_: torch.uint8)

    def give(hardware: Hardware) -> None:
        for module in (choice, pool_checks):
            monkeypatch.setattr(module, "probe_hardware", lambda: hardware)

    return give


NO_FP8 = r"float8_e4m3fn needs compute capability \(8, 9\), and this is \(8, 0\)"
TOO_OLD = r"it needs compute capability \(8, 0\), and this is .*Tesla V100"
OF_FP8 = {"dtype": torch.bfloat16, "pool_dtype": FP8}


@pytest.mark.parametrize(
    ("call", "sizes", "hardware", "reason"),
    [
        (decode, {"head_dim": 320}, H200, "heads have at most 256 elements, and these 320"),
        (decode, {"dtype": torch.float64}, H200, "these are float64"),
        (decode, {"heads": 33}, H200, "at most 32 heads share"),
        (decode, OF_FP8, A100, NO_FP8),
        (decode, {}, V100, TOO_OLD),
        (prefill, {"head_dim": 8}, H200, "heads of 16 to 256 elements, and these 8"),
        (prefill, {"head_dim": 320}, H200, "heads of 16 to 256 elements, and these 320"),
        (prefill, {"dtype": torch.float64}, H200, "these are float64"),
        (prefill, {"dtype": torch.float32}, H200, "tensor cores, which round float32"),
        (prefill, {"heads": 65}, H200, "at most 64 heads share"),
        (prefill, OF_FP8, A100, NO_FP8),
        (prefill, {}, V100, TOO_OLD),
        (write, {"head_dim": 1025}, H200, "heads of up to 1024, and this is 1025"),
        (write, {"dtype": torch.float64}, H200, "computes nothing in torch.float64"),
        (write, OF_FP8, A100, NO_FP8),
        (write, {}, V100, TOO_OLD),
        (copy, {}, V100, TOO_OLD),
        (gather, {}, V100, TOO_OLD),
        (gather, {"strange": "rows"}, H200, "cannot reach cpu memory that is not page-locked"),
        (scatter, {"strange": "rows"}, H200, "cannot reach cpu memory that is not page-locked"),
    ],
)
def test_what_triton_cannot_do(
    call: Callable[..., None],
    sizes: dict[str, Any],
    hardware: Hardware,
    reason: str,
    machine: Callable[[Hardware], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine(hardware)
    with FakeTensorMode(), caplog.at_level(logging.WARNING):
        for wish in ({"kernel": TRITON}, {"kernel": AUTO, "strict": True}):
            with pytest.raises(KernelRefused, match=f"cannot run: .*{reason}.*use the plain one"):
                call(sizes, **wish)
        assert not caplog.messages
        for _ in range(2):
            with pytest.raises(Reached):
                call(sizes)
    assert len(caplog.messages) == 1 and "plain kernels instead of Triton's" in caplog.text


@pytest.mark.parametrize("call", [decode, prefill, write])
def test_fp8_without_hardware_concerns_the_device_that_has_the_pool(
    call: Callable[..., None], machine: Callable[[Hardware], None]
) -> None:
    """The interpreter converts by itself; a device of capability 8.9 in hardware."""
    machine(A100)
    pool = torch.empty(1, 2, 16, 1, 64, dtype=FP8)
    assert pool_checks.reason_against_fp8(pool) is None
    with FakeTensorMode():
        older = torch.empty(1, 2, 16, 1, 64, dtype=FP8, device="cuda:0")
        assert pool_checks.reason_against_fp8(older) is not None
        assert pool_checks.reason_against_fp8(older.view(torch.uint8)) is None
        for hardware in (Hardware("NVIDIA L4", (8, 9), True), H200):
            machine(hardware)
            assert pool_checks.reason_against_fp8(older) is None
        machine(A100)
        with pytest.raises(Reached):  # CPU tensors beside such a device: nothing is warned of
            call({**OF_FP8, "device": "cpu"}, strict=True)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (decode, ["q", "kv", "tables", "lengths", "kv_scales"]),
        (prefill, ["q", "kv", "tables", "lengths", "starts", "kv_scales"]),
        (write, ["k", "kv", "slots", "kv_scales"]),
        (copy, ["kv", "slots"]),
        (gather, ["kv", "slots"]),
        (scatter, ["kv", "slots"]),
    ],
)
@pytest.mark.parametrize("kernel", ["auto", "plain", "triton"])
def test_tensors_on_different_devices(
    call: Callable[..., None], names: list[str], kernel: str, machine: Callable[[Hardware], None]
) -> None:
    machine(H200)
    for strange in names:
        with FakeTensorMode(), pytest.raises(KernelRefused, match=r"expected .*cpu") as refused:
            call({**OF_FP8, "strange": strange}, kernel=kernel)
        assert "cuda:0" in str(refused.value) and "got" in str(refused.value)


def test_what_is_written_has_a_place_for_each_element(device: torch.device) -> None:
    """An expanded tensor reads well, but of two programs that write one place, which stays?"""
    q = torch.zeros(2, 4, 64, device=device).half()
    kv = torch.zeros(4, 2, 16, 2, 64, device=device).half()
    k, slots = kv[0, 0, :3], torch.arange(3, device=device)
    integers = [torch.ones(n, dtype=torch.int32, device=device) for n in (2, 3)]
    tables = torch.zeros(2, 1, dtype=torch.int32, device=device)
    for refused in (q[:1].expand(2, 4, 64), q[:, :1].expand(2, 4, 64)):
        with pytest.raises(KernelRefused, match="expected out, which is written, with a place for"):
            paged_decode(q, kv, tables, integers[0], scale=1.0, out=refused)
        with pytest.raises(KernelRefused, match="expected out, which is written, with a place for"):
            paged_prefill(q, kv, tables, *integers, max_query_len=1, scale=1.0, out=refused)
    for refused in (kv[:1].expand(4, 2, 16, 2, 64), kv[:, :, :, :1].expand(4, 2, 16, 2, 64)):
        with pytest.raises(KernelRefused, match=r"expected kv, which is written, .*got \[4, 2, 16"):
            write_kv(k, k, refused, slots)
    scales = torch.ones(1, 2, 16, 2, device=device).expand(4, 2, 16, 2)
    pool = kv.to(FP8)
    with pytest.raises(KernelRefused, match="expected kv_scales, which is written"):
        write_kv(k, k, pool, slots, kv_scales=scales)
    write_kv(k, k, pool, slots, kv_scales=torch.ones(2, 1, device=device).expand(2, 2))
