# ruff: noqa: E501, E731, B023
"""Decode and prefill attention: ours (paged) beside torch SDPA (contiguous), in captured graphs.

for i in $(seq 0 11); do python benchmarks/gpu/attention.py OUT.json --compile $i 12 & done; wait
python benchmarks/gpu/attention.py OUT.json [--sweep]

Launches and standing counters are those that the engine gives. With --sweep also those around them;
what is best there stands in `halogen_triton/tables/sm_90.json`, which `shipped.py` compiles.
"""

from __future__ import annotations

import argparse
import math

import attrs
import torch
import torch.nn.functional as F
from timing import graph_time, median, save
from torch.nn.attention import SDPBackend, sdpa_kernel

from halogen_triton.attention import (
    AttentionPlan,
    HeadShape,
    LayerKV,
    Sequences,
    attention,
    attention_plan,
)
from halogen_triton.launch import Launch, tuning

HQ, HKV, D = 40, 8, 128
DECODE = [(1, 4096), (1, 32768), (1, 131072), (8, 4096), (8, 32768), (32, 4096), (32, 16384)]
PREFILL = [2048, 8192, 32768]
SHARED = [(32, 32), (32, 1), (32, 4), (128, 128), (128, 1), (128, 8)]
"""Sequences, and the prefixes of 3,072 tokens that they share; 1,024 tokens are their own."""
SHAPE = HeadShape(num_heads=HQ, num_kv_heads=HKV, head_dim=D, scale=D**-0.5)
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
    layers: list[LayerKV], tables: torch.Tensor, length: int, plan: AttentionPlan
) -> tuple[list[float], float]:
    batch = len(tables)
    q = torch.randn(batch, HQ * D, device="cuda", dtype=torch.bfloat16)
    seqs = sequences(batch, length, 1, tables)
    # as the engine has them; without, each call would clear its own
    joins = torch.zeros(batch * HKV, dtype=torch.int32, device="cuda")
    out = attention(q, layers[0], seqs, SHAPE, plan, joins=joins)
    error = check(out, q, layers[0], tables, length)
    calls = [lambda x=x: attention(q, x, seqs, SHAPE, plan, joins=joins) for x in layers]
    return graph_time(calls), error


def plans(sweep: bool, batch: int) -> list[tuple[str, AttentionPlan]]:
    base = attention_plan(tuning("sm_90"), D, quantised=False, pairs=batch * HKV)
    found = [("shipped", base)]
    grid = ((5, 132, False), (4, 132, False), (3, 132, False), (3, 264, False), (4, 264, False), (5, 132, True), (3, 264, True))  # fmt: skip
    for stages, programs, unmasked in grid if sweep else ():
        launch = attrs.evolve(base.decode, stages=stages, unmasked=unmasked)
        plan = attrs.evolve(base, decode=launch, programs=programs)
        found.append((f"s{stages} p{programs}{' two loops' if unmasked else ''}", plan))
    if sweep:
        launch = attrs.evolve(base.decode, block_m=8, block_n=32, warps=2, stages=4)
        found.append(("n32 w2 s4 p264", attrs.evolve(base, decode=launch, programs=264)))
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
        layers, tables = paged(batch, length, copies(batch * length * HKV * D * 4), BLOCK)
        for name, plan in plans(sweep, batch):
            samples, error = ours_decode(layers, tables, length, plan)
            row["ours"][name] = {"us": [s * 1e6 for s in samples], "error": error}
        rows.append(row)
        best = sorted((median(v["us"]), k, v["error"]) for k, v in row["ours"].items())
        peers = {
            k: round(median(row[k]), 1) for k in ("flash", "cudnn") if isinstance(row[k], list)
        }
        print(f"decode {batch}x{length} limit {limit * 1e6:.1f} {peers} shipped "
              f"{median(row['ours']['shipped']['us']):.1f}", *(f"{t:.1f}:{k}({e:.0e})" for t, k, e in best[:5]), flush=True)  # fmt: skip
        del layers
        torch.cuda.empty_cache()
    return rows


def prefill_plans(sweep: bool, length: int) -> list[tuple[str, AttentionPlan]]:
    base = attention_plan(tuning("sm_90"), D, quantised=False, length=length)
    found = [("shipped", base), ("triton", attrs.evolve(base, hopper=None))]
    for bm, bn, w, s in ((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)):
        if sweep:
            launch = Launch(block_m=bm, block_n=bn, warps=w, stages=s)
            plan = attrs.evolve(base, hopper=None, prefill=launch)
            found.append((f"triton m{bm} n{bn} w{w} s{s}", plan))
    return found


def prefill(sweep: bool) -> list[dict]:
    rows = []
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
        for name, plan in prefill_plans(sweep, length):
            try:
                call = lambda plan=plan: attention(qq, layers[0], seqs, SHAPE, plan)
                error = check(call()[-1:], qq[-1:], layers[0], tables, length)
                samples = [flops / s / 1e12 for s in graph_time([call], repeats=8)]
                row["ours"][name] = {"tflops": samples, "error": error}
            except Exception as exc:  # out of resources is a result
                row["ours"][name] = str(exc)[:120]
        rows.append(row)
        best = sorted(
            (
                (median(v["tflops"]), k, v["error"])
                for k, v in row["ours"].items()
                if isinstance(v, dict)
            ),
            reverse=True,
        )
        print(f"prefill {length} flash {median(row['flash']):.0f} cudnn {median(row['cudnn']):.0f}",
              *(f"{t:.0f}:{k}({e:.0e})" for t, k, e in best[:6]), flush=True)  # fmt: skip
    return rows


def shared_tables(batch: int, prefixes: int, order: str) -> tuple[int, torch.Tensor]:
    """Blocks of a pool, and tables [batch, 64] over them: 48 blocks of a prefix, 16 own."""
    blocks = prefixes * 48 + batch * 16
    ids = torch.randperm(blocks, device="cuda").int()
    which = torch.arange(batch, device="cuda")
    which = which % prefixes if order == "interleaved" else which * prefixes // batch
    common, own = ids[: prefixes * 48].view(prefixes, 48), ids[prefixes * 48 :].view(batch, 16)
    return blocks, torch.cat([common[which], own], 1).contiguous()


def shared() -> list[dict]:
    """Decode over shared blocks, by order of the sequences in the batch."""
    rows = []
    for batch, prefixes in SHARED:
        for order in ("neighbours", "interleaved")[: 1 + (1 < prefixes < batch)]:
            blocks, tables = shared_tables(batch, prefixes, order)
            layers = [
                LayerKV(data=torch.randn(blocks, 2, HKV, 64, D, device="cuda").bfloat16())
                for _ in range(copies(blocks * 64 * HKV * D * 4))
            ]
            plan = plans(False, batch)[0][1]
            samples, error = ours_decode(layers, tables, 4096, plan)
            row = {"batch": batch, "prefixes": prefixes, "order": order, "error": error}
            rows.append({**row, "us": [s * 1e6 for s in samples]})
            print("shared", row, f"{median(rows[-1]['us']):.1f}", flush=True)
            del layers
            torch.cuda.empty_cache()
    return rows


def compile_share(index: int, shares: int) -> None:
    """Compile a share of all launches by calling them on short sequences."""
    calls = [("decode", b, p) for b in (1, 8, 32, 128) for p in range(len(plans(b < 128, b)))]
    calls += [("prefill", 1, p) for p in range(len(prefill_plans(True, 2048)))]
    for kind, batch, which in calls[index::shares]:
        layers, tables = paged(batch, 1024, 1, BLOCK)
        if kind == "decode":
            ours_decode(layers, tables, 1024, plans(batch < 128, batch)[which][1])
        else:
            q = torch.randn(1024, HQ * D, device="cuda", dtype=torch.bfloat16)
            plan = prefill_plans(True, 2048)[which][1]
            attention(q, layers[0], sequences(1, 1024, 1024, tables), SHAPE, plan)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument(
        "--compile", nargs=2, type=int, help="share and number of shares; only this"
    )
    options = parser.parse_args()
    if options.compile:
        compile_share(*options.compile)
        return
    torch.manual_seed(0)
    results = {"prefill": prefill(options.sweep)}
    save(options.out, results)
    results |= {"decode": decode(options.sweep)}
    save(options.out, results)
    save(options.out, results | {"shared": shared()})


if __name__ == "__main__":
    main()
