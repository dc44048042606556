# SPDX-License-Identifier: Apache-2.0
"""Peers from a folder: right ones are measured, all others are notes.

The folder holds modules with the names and signatures of the real ones and a slow attention of our
own in them, so that the way data takes to a peer and back is tested without any of their code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stratakv.benchmarks.gpu.attention import cases as attention_cases
from stratakv.benchmarks.gpu.attention import peers, prefill
from stratakv.benchmarks.gpu.attention.cases import Case, decode_case, make_batch
from stratakv.benchmarks.gpu.attention.peers import PeerRefused, TorchAttention
from stratakv.benchmarks.gpu.section import Results, WrongResult

from .attention_runs import empty_results, one_wrong_row, refuse_timing, rehearsal

SLOW = """
import torch

def attend(q, key, value, tables, lengths, starts, scale):
    out = torch.empty_like(q)
    group = q.shape[1] // key.shape[2]
    for request, length in enumerate(lengths.tolist()):
        begin, end = starts[request], starts[request + 1]
        blocks = tables[request][: -(-length // key.shape[1])].long()
        k, v = (x[blocks].flatten(0, 1)[:length].float() for x in (key, value))
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), k) * scale
        mask = torch.ones(end - begin, length, dtype=torch.bool).tril(length - (end - begin))
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v)
    return out
"""
FLASH = """
from slow_attention import attend

def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=None, page_table=None,
                            cu_seqlens_q=None, max_seqlen_q=None, softmax_scale=None,
                            causal=False, window_size=(-1, -1)):
    assert causal and window_size == (-1, -1)
    if cu_seqlens_q is not None:
        assert max_seqlen_q >= max(cu_seqlens_q.diff().tolist())
        starts = cu_seqlens_q.tolist()
        return attend(q, k_cache, v_cache, page_table, cache_seqlens, starts, softmax_scale)
    assert q.shape[1] == 1
    starts = list(range(len(q) + 1))
    out = attend(q[:, 0], k_cache, v_cache, page_table, cache_seqlens, starts, softmax_scale)
    return out[:, None], "sums"
"""
VLLM = """
from slow_attention import attend

def unified_attention(q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k,
                      softmax_scale, causal, window_size, block_table, softcap, q_descale,
                      k_descale, v_descale, seq_threshold_3D=None, softmax_segm_output=None):
    assert causal and softcap == 0 and max_seqlen_k == max(seqused_k.tolist())
    assert softmax_segm_output.shape[0] >= seq_threshold_3D
    starts = cu_seqlens_q.tolist()
    out.copy_(attend(q, k, v, block_table, seqused_k, starts, softmax_scale))
"""
FLASHINFER = """
import torch
from slow_attention import attend

class _Wrapper:
    def __init__(self, workspace, kv_layout="NHD", use_tensor_cores=False):
        assert kv_layout == "NHD"

    def _plan(self, starts, pages, ids, fill, page_size, sm_scale):
        self.starts, self.scale = starts, sm_scale
        widths = pages.diff().tolist()
        self.tables = torch.split(ids, widths)
        self.lengths = (pages.diff() - 1) * page_size + fill

    def run(self, q, paged_kv_cache):
        key, value = paged_kv_cache
        return attend(q, key, value, self.tables, self.lengths, self.starts, self.scale)

class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim,
             page_size, sm_scale=None, window_left=-1, logits_soft_cap=None):
        starts = list(range(len(last_page_len) + 1))
        self._plan(starts, indptr, indices, last_page_len, page_size, sm_scale)

class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
             num_qo_heads, num_kv_heads, head_dim_qk, page_size, causal=False, **options):
        assert causal and options["q_data_type"] == torch.bfloat16
        self._plan(qo_indptr.tolist(), paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
                   page_size, options["sm_scale"])
"""
VLLM_FILE = "vllm/v1/attention/ops/triton_unified_attention.py"
FAKES = {
    "slow_attention.py": SLOW,
    "flash_attn_interface.py": FLASH,
    VLLM_FILE: VLLM,
    "flashinfer.py": FLASHINFER,
}


def put(folder: Path, **replaced: str) -> Path:
    """A folder of peers, `replaced` by the stem of a file."""
    for name, source in FAKES.items():
        path = folder / "peers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(replaced.get(path.stem, source))
    return folder / "peers"


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that a test imports from its folder is left for another one."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    roots = ("slow_attention", "flash_attn_interface", "flash_attn_3", "vllm", "flashinfer")
    assert not [name for name in sys.modules if name.split(".")[0] in roots]
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in roots]:
        del sys.modules[name]


def notes(results: Results) -> list[str]:
    return list(results.report.figures["peers"]["notes"])


def run(folder: Path | None, directory: Path) -> Results:
    results = empty_results(directory)
    peers.run(rehearsal(folder), results)
    return results


def test_right_peers_are_measured(tmp_path: Path) -> None:
    results = run(put(tmp_path), tmp_path)
    rows = results.rows("peers")
    assert [row["kind"] for row in rows] == ["prefill", "prefill", "decode", "decode"]
    for row in rows:
        assert row["seconds"] > 0
        assert row["peers"].keys() == {"peer_triton", "fa3", "torch", "flashinfer"}, notes(results)
        assert all(seconds > 0 for seconds in row["peers"].values())
    assert {target.name for target in peers.SECTION.targets} <= results.report.ratios.keys()
    assert len(notes(results)) == 4  # what each of them is
    assert any("less work" in note for note in notes(results))
    path = peers.SECTION.plot(results, tmp_path / "plots")
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")
    results.write()


def test_ratios_are_their_time_over_ours(tmp_path: Path) -> None:
    results = empty_results(tmp_path)
    for case, kind, seconds, theirs in (
        (prefill.GRID[0], "prefill", 1.0, 2.0),
        (prefill.GRID[1], "prefill", 1.0, 8.0),
        ("mixed", "prefill", 1.0, 1000.0),
        ("1k x 1", "decode", 4.0, 2.0),
    ):
        row = {"case": case, "kind": kind, "seconds": seconds, "peers": {"fa3": theirs}}
        results.add_row("peers", row)
    peers.set_ratios(results, "fa3")
    assert results.report.ratios == pytest.approx({"prefill_over_fa3": 4.0, "decode_over_fa3": 0.5})


def test_no_folder_and_nothing_installed(tmp_path: Path) -> None:
    results = run(None, tmp_path)
    assert all(row["peers"].keys() == {"torch"} for row in results.rows("peers"))
    missing = [note for note in notes(results) if "not measured" in note]
    assert len(missing) == 3 and all("No module named" in note for note in missing)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise OSError('libcudart.so.13: no such file')", "OSError: libcudart.so.13"),
        ("raise SystemExit('no device')", "SystemExit: no device"),
        ("import a_module_that_is_nowhere", "a_module_that_is_nowhere"),
        ("something_else = 1", "flash_attn_with_kvcache"),
        ("def flash_attn_with_kvcache(:", "SyntaxError"),
    ],
)
def test_an_import_that_fails_is_a_note(source: str, reason: str, tmp_path: Path) -> None:
    results = run(put(tmp_path, flash_attn_interface=source), tmp_path)
    (note,) = (note for note in notes(results) if note.startswith("fa3"))
    assert "not measured" in note and reason in note
    for row in results.rows("peers"):
        assert row["peers"].keys() == {"peer_triton", "torch", "flashinfer"}


def test_a_wrong_peer_is_not_measured(tmp_path: Path) -> None:
    wrong = FLASH.replace("return attend(", "return 1.1 * attend(")  # prefill alone
    results = run(put(tmp_path, flash_attn_interface=wrong), tmp_path)
    in_prefill, in_decode = results.rows("peers")[:2], results.rows("peers")[2:]
    assert all("fa3" not in row["peers"] for row in in_prefill)
    assert all("fa3" in row["peers"] for row in in_decode)
    assert sum("fa3, " in note and "WrongResult" in note for note in notes(results)) == 2
    assert "prefill_over_fa3" not in results.report.ratios
    assert "decode_over_fa3" in results.report.ratios


def test_a_peer_that_always_fails_is_left_out(tmp_path: Path) -> None:
    broken = "def flash_attn_with_kvcache(q, k, v, cache_seqlens, page_table, **more):\n    1 / 0\n"
    results = run(put(tmp_path, flash_attn_interface=broken), tmp_path)
    of_fa3 = [note for note in notes(results) if note.startswith("fa3")]
    assert len([note for note in of_fa3 if "ZeroDivisionError" in note]) == peers.MAX_FAULTS
    assert of_fa3[-1] == "fa3: left out after 3 faults"


def test_another_version_without_pages_is_refused(tmp_path: Path) -> None:
    older = "def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=None): ...\n"
    results = run(put(tmp_path, flash_attn_interface=older), tmp_path)
    refused = [note for note in notes(results) if "this version takes no" in note]
    assert len(refused) == 4 and "cu_seqlens_q, page_table" in refused[0]


def test_what_torch_refuses() -> None:
    tiny = {"kv_heads": 2, "head_dim": 16, "block_size": 8}
    for case, reason in (
        (Case(name="a", chunks=((3, 2), (1, 0)), kv_heads=1, head_dim=16), "one length"),
        (decode_case("a", 2, 9, window=4, **tiny), "window"),
        (decode_case("a", 2, 9, softcap=4.0, **tiny), "soft cap"),
        (decode_case("a", 2, 9, scales="head", **tiny), "float8"),
    ):
        with pytest.raises(PeerRefused, match=reason):
            TorchAttention().prepare(make_batch(rehearsal(), case))


def test_ours_must_be_right_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = one_wrong_row(attention_cases.paged_prefill)
    monkeypatch.setattr(attention_cases, "paged_prefill", wrong)
    refuse_timing(monkeypatch, attention_cases)
    with pytest.raises(WrongResult):
        run(None, tmp_path)


def test_a_device_that_a_peer_has_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    place = rehearsal()

    def fail(self: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(type(place), "synchronise", fail)
    with pytest.raises(RuntimeError, match=r"torch left the device unusable .*illegal memory"):
        peers.check_device(place, TorchAttention())


def test_installed_packages_come_first(tmp_path: Path) -> None:
    folder = put(tmp_path)
    (folder / "torch.py").write_text("raise ImportError('the wrong torch')")
    run(folder, tmp_path)
    assert sys.path[-1] == str(folder)
    assert sys.modules["torch"] is torch
