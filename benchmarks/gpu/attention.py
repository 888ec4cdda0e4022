# ruff: noqa: E501, E731, B023
"""Decode and prefill attention: ours (paged) beside torch SDPA (contiguous), in captured graphs.

python benchmarks/gpu/attention.py OUT.json [--sweep]
"""

from __future__ import annotations

import argparse
import itertools
import math

import attrs
import torch
import torch.nn.functional as F
from timing import graph_time, median, save
from torch.nn.attention import SDPBackend, sdpa_kernel

from halogen_triton.attention import AttentionPlan, HeadShape, LayerKV, Sequences, attention
from halogen_triton.launch import Launch, tuning

HQ, HKV, D = 40, 8, 128
DECODE = [(1, 4096), (1, 32768), (1, 131072), (8, 4096), (8, 32768), (32, 4096), (32, 16384)]
PREFILL = [2048, 8192, 32768]
READ_LIMIT = 4.58e12
BLOCK = 64


def copies(nbytes: int) -> int:
    """Inputs to rotate over: five times the L2 cache, within reason."""
    return max(1, min(16, math.ceil(300e6 / nbytes)))


def paged(batch: int, length: int, layers: int, block: int) -> tuple[list[LayerKV], torch.Tensor]:
    per = math.ceil(length / block)
    pool = torch.randn(
        layers, batch * per + 1, 2, HKV, block, D, device="cuda", dtype=torch.bfloat16
    )
    order = torch.randperm(batch * per, device="cuda").int().view(batch, per)
    return [LayerKV(data=pool[i]) for i in range(layers)], order


def sequences(batch: int, length: int, queries: int, tables: torch.Tensor) -> Sequences:
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * queries
    return Sequences(
        starts=starts,
        seq_lens=torch.full((batch,), length, device="cuda", dtype=torch.int32),
        tables=tables,
        num_tokens=batch * queries,
        max_query_len=queries,
        has_decodes=queries == 1,
        has_prefills=queries > 1,
    )


def sdpa_decode(batch: int, length: int, backend: SDPBackend) -> list[float]:
    count = copies(batch * length * HKV * D * 4)
    q = torch.randn(batch, HQ, 1, D, device="cuda", dtype=torch.bfloat16)
    kv = [
        torch.randn(2, batch, HKV, length, D, device="cuda", dtype=torch.bfloat16)
        for _ in range(count)
    ]
    with sdpa_kernel(backend):
        return graph_time(
            [lambda x=x: F.scaled_dot_product_attention(q, x[0], x[1], enable_gqa=True) for x in kv]
        )


def check(out: torch.Tensor, q: torch.Tensor, kv: LayerKV, tables: torch.Tensor, n: int) -> float:
    """Worst relative error of the first sequence against float64."""
    block = kv.block_size
    used = tables[0, : math.ceil(n / block)].long()
    k, v = (kv.data[used, i].transpose(1, 2).flatten(0, 1)[:n].double() for i in (0, 1))
    qq = q[0].view(HKV, HQ // HKV, D).double()
    p = (torch.einsum("hgd,nhd->hgn", qq, k) * D**-0.5).softmax(-1)
    want = torch.einsum("hgn,nhd->hgd", p, v).flatten()
    return float((out[0].double() - want).abs().max() / want.abs().max())


def ours_decode(
    batch: int, length: int, plan: AttentionPlan, block: int
) -> tuple[list[float], float]:
    layers, tables = paged(batch, length, copies(batch * length * HKV * D * 4), block)
    q = torch.randn(batch, HQ * D, device="cuda", dtype=torch.bfloat16)
    seqs = sequences(batch, length, 1, tables)
    shape = HeadShape(num_heads=HQ, num_kv_heads=HKV, head_dim=D, scale=D**-0.5)
    # as the engine has them; without, each call would clear its own
    joins = torch.zeros(batch * HKV, dtype=torch.int32, device="cuda")
    out = attention(q, layers[0], seqs, shape, plan, joins=joins)
    error = check(out, q, layers[0], tables, length)
    calls = [lambda x=x: attention(q, x, seqs, shape, plan, joins=joins) for x in layers]
    return graph_time(calls), error


def plans(sweep: bool, batch: int) -> list[tuple[str, AttentionPlan, int]]:
    table = tuning("sm_90")
    rule = table.rule("decode", d=D, pairs=batch * HKV)
    base = AttentionPlan(
        prefill=table.launch("prefill", d=D), decode=rule.launch, programs=rule.programs
    )
    found = [("shipped", base, BLOCK)]
    if sweep:
        grid = itertools.product(
            (64, 128), (2, 3, 4), (132, 264, 396), (False, True), (False, True)
        )
        for bn, stages, programs, pdl, unmasked in grid:
            if bn == 128 and (stages, programs) not in ((2, 264), (2, 132), (3, 132)):
                continue
            decode = Launch(block_n=bn, warps=4, stages=stages, pdl=pdl, unmasked=unmasked)
            plan = attrs.evolve(base, decode=decode, programs=programs)
            name = f"n{bn} s{stages} p{programs}{' pdl' if pdl else ''}{' two' if unmasked else ''}"
            found.append((name, plan, BLOCK))
    return found


def decode(sweep: bool) -> list[dict]:
    rows = []
    for batch, length in DECODE:
        limit = batch * length * HKV * D * 4 / READ_LIMIT
        row = {"batch": batch, "length": length, "limit_us": limit * 1e6, "ours": {}}
        for name, backend in (
            ("flash", SDPBackend.FLASH_ATTENTION),
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ):
            try:
                row[name] = [s * 1e6 for s in sdpa_decode(batch, length, backend)]
            except RuntimeError as exc:
                row[name] = str(exc)[:200]
        for name, plan, block in plans(sweep, batch):
            samples, error = ours_decode(batch, length, plan, block)
            row["ours"][name] = {"us": [s * 1e6 for s in samples], "error": error}
        rows.append(row)
        best = sorted((median(v["us"]), k, v["error"]) for k, v in row["ours"].items())
        peers = {
            k: round(median(row[k]), 1) for k in ("flash", "cudnn") if isinstance(row[k], list)
        }
        print(f"decode {batch}x{length} limit {limit * 1e6:.1f} {peers} shipped "
              f"{median(row['ours']['shipped']['us']):.1f}", *(f"{t:.1f}:{k}({e:.0e})" for t, k, e in best[:5]), flush=True)  # fmt: skip
        torch.cuda.empty_cache()
    return rows


def prefill(sweep: bool) -> list[dict]:
    rows = []
    table = tuning("sm_90")
    others: list[tuple[str, Launch]] = []
    if sweep:
        for bm, bn, w, s in ((128, 64, 8, 2), (128, 64, 4, 2), (128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 128, 8, 3), (128, 32, 8, 3), (256, 64, 8, 2)):  # fmt: skip
            name = f"m{bm} n{bn} w{w} s{s}"
            others.append((name, Launch(block_m=bm, block_n=bn, warps=w, stages=s)))
    shape = HeadShape(num_heads=HQ, num_kv_heads=HKV, head_dim=D, scale=D**-0.5)
    for length in PREFILL:
        flops = 2 * 2 * HQ * D * length * (length + 1) / 2
        row = {"length": length, "ours": {}}
        q, k, v = (
            torch.randn(1, h, length, D, device="cuda", dtype=torch.bfloat16)
            for h in (HQ, HKV, HKV)
        )
        for name, backend in (
            ("flash", SDPBackend.FLASH_ATTENTION),
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ):
            with sdpa_kernel(backend):
                call = lambda: F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=True
                )
                row[name] = [flops / s / 1e12 for s in graph_time([call], repeats=8)]
        layers, tables = paged(1, length, 1, BLOCK)
        qq = torch.randn(length, HQ * D, device="cuda", dtype=torch.bfloat16)
        seqs = sequences(1, length, length, tables)
        shipped = ("shipped", table.launch("prefill", d=D, quant=0, length=length))
        for name, launch in (shipped, *others):
            plan = AttentionPlan(prefill=launch, decode=table.launch("decode", d=D), programs=264)
            try:
                call = lambda plan=plan: attention(qq, layers[0], seqs, shape, plan)
                row["ours"][name] = [flops / s / 1e12 for s in graph_time([call], repeats=8)]
            except Exception as exc:  # out of resources is a result
                row["ours"][name] = str(exc)[:120]
        rows.append(row)
        best = sorted(
            ((median(v), k) for k, v in row["ours"].items() if isinstance(v, list)), reverse=True
        )
        print(f"prefill {length} flash {median(row['flash']):.0f} cudnn {median(row['cudnn']):.0f}",
              *(f"{t:.0f}:{k}" for t, k in best[:6]), flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    save(options.out, {"decode": decode(options.sweep), "prefill": prefill(options.sweep)})


if __name__ == "__main__":
    main()
