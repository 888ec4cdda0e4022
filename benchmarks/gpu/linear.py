"""GEMV, small and large GEMM: ours beside cuBLAS, bytes of weights over time, in captured graphs.

python benchmarks/gpu/linear.py OUT.json [--formats BF16,Q4_K] [--sweep] [--processes 16]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Callable

import attrs
import torch
from timing import graph_time, median, save

from halogen_core.spi import FORMATS
from halogen_triton.ahead import compiling_for
from halogen_triton.launch import Launch, Rule, tuning
from halogen_triton.linear import embedding_rows, linear
from halogen_triton.packing import arranged
from halogen_triton.planes import Planes, repack, repack_groups
from halogen_triton.shipped import meta_tiles
from halogen_triton.tiles import Tiles

SHAPES = [
    (4608, 3584),
    (3584, 3584),
    (37888, 3584),
    (3584, 18944),
    (152064, 3584),
    (27648, 5120),
    (5120, 27648),
]
PACKED_SHAPES = [(27648, 5120), (5120, 27648), (37888, 3584), (3584, 18944)]
PACKED_ROWS = (1, 2, 8, 16)
PREFILL_ROWS = (64, 512, 2048)
FORMS = "BF16,Q4_K,Q6_K,Q8_0,Q5_K,Q4_0,INT4"


def planes(form: str, n: int, k: int) -> Planes:
    """Random bits; INT4 has groups of 128 with zeros, as AWQ."""
    if form == "INT4":
        raw = torch.randint(0, 256, (n * k // 2,), device="cuda", dtype=torch.uint8)
        zero = torch.randint(0, 16, (n, k // 128), device="cuda", dtype=torch.uint8)
        scale = (torch.rand(n, k // 128, device="cuda") / 100 + 0.005).half()
        return repack_groups(form, raw, (n, k), {"scale": scale, "zero": zero})
    block, size = (32, 17) if form == "MXFP4" else (FORMATS[form].block, FORMATS[form].bytes)
    raw = torch.randint(0, 256, (n * k // block, size), device="cuda", dtype=torch.uint8)
    if form == "MXFP4":
        raw[:, 0] = torch.randint(117, 124, (len(raw),), device="cuda", dtype=torch.uint8)
    else:
        places = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}
        for at in places.get(form, (0, 2)):
            value = (torch.rand(len(raw), 1, device="cuda") * 0.01 + 0.003).half()
            raw[:, at : at + 2] = value.view(torch.uint8)
    return repack(form, raw, (n, k))


def copies(weight: Tiles) -> list[Tiles]:
    """As many as exceed the L2 cache several times."""
    made = [weight]
    for _ in range(min(11, math.ceil(300e6 / weight.nbytes) - 1)):
        parts = {name: getattr(weight, name).clone() for name in ("codes", "records")}
        own = weight.high is weight.codes
        high = parts["codes"] if own else weight.high.clone()
        made.append(attrs.evolve(weight, **parts, high=high))
    return made


def seconds(call: Callable[[object], object], weights: list) -> list[float]:
    return graph_time([lambda w=w: call(w) for w in weights])


def gigabytes(samples: list[float], nbytes: int) -> list[float]:
    return [nbytes / s / 1e9 for s in samples]


def dense(rows: int, n: int, k: int, sweep: bool) -> dict:
    """Bfloat16 beside cuBLAS."""
    count = max(1, min(12, math.ceil(300e6 / (n * k * 2))))
    ws = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    base = tuning("sm_90")
    tables = {"shipped": base, "shipped no pdl": attrs.evolve(base, pdl=False)}
    for launch in dense_launches(rows) if sweep else ():
        kind = "dense_gemv" if rows == 1 else "dense_gemm"
        tables[label(launch)] = attrs.evolve(
            base, rules={**base.rules, kind: (Rule(launch=launch),)}
        )
    row: dict = {"format": "BF16", "rows": rows, "n": n, "k": k, "bytes": ws[0].nbytes}
    row["ours"] = {}
    # as the engine has them; without, each call would clear its own
    joins = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
    for name, table in tables.items():
        try:
            taken = seconds(lambda w, t=table: linear(x, w, t, joins=joins), ws)
            row["ours"][name] = gigabytes(taken, ws[0].nbytes)
        except Exception as exc:  # out of resources is a result
            row["ours"][name] = str(exc)[:100]
    peer = seconds(lambda w: torch.nn.functional.linear(x, w), ws)
    row["cublas"] = gigabytes(peer, ws[0].nbytes)
    best = sorted(
        ((median(v), key) for key, v in row["ours"].items() if isinstance(v, list)), reverse=True
    )
    print(f"BF16 {rows}x{n}x{k} cublas {median(row['cublas']):.0f}",
          *(f"{t:.0f}:{key}" for t, key in best[:4]), flush=True)  # fmt: skip
    return row


def packed(form: str, n: int, k: int) -> list[dict]:
    """A packed format as the backend lays it out, by shipped launches."""
    table = tuning("sm_90")
    weight = arranged(planes(form, n, k), table, torch.bfloat16)
    assert isinstance(weight, Tiles)
    ws = copies(weight)
    found = []
    for rows in PACKED_ROWS:
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        rates = gigabytes(seconds(lambda w, x=x: linear(x, w, table), ws), weight.nbytes)
        shape = {"format": form, "rows": rows, "n": n, "k": k, "bytes": weight.nbytes}
        found.append({**shape, "ours": {"shipped": rates}})
    line = "  ".join(f"{r['rows']}: {median(r['ours']['shipped']):.0f}" for r in found)
    print(f"{form} {n}x{k} GB/s by rows  {line}", flush=True)
    return found


def prefill(form: str, n: int, k: int) -> list[dict]:
    """Many rows: TFLOP/s of a packed weight beside cuBLAS on the same weight in bfloat16."""
    table = tuning("sm_90")
    weight = arranged(planes(form, n, k), table, torch.bfloat16)
    plain = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    found = []
    for rows in PREFILL_ROWS:
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        flop = 2e-12 * rows * n * k
        # one weight: its bytes are a small part of the time
        ours = [flop / s for s in seconds(lambda w, x=x: linear(x, w, table), [weight] * 2)]
        peer = seconds(lambda w, x=x: torch.nn.functional.linear(x, w), [plain] * 2)
        shape = {"format": form, "rows": rows, "n": n, "k": k, "tflops": ours}
        found.append({**shape, "cublas_tflops": [flop / s for s in peer]})
        rates = median(ours), median(found[-1]["cublas_tflops"])
        print(f"{form} {rows}x{n}x{k} TFLOP/s {rates[0]:.0f} cublas {rates[1]:.0f}", flush=True)
    return found


def compile_packed(job: tuple[str, int, int]) -> None:
    """Compile what `packed` and `prefill` run: processes side by side fill the cache."""
    form, n, k = job
    weight = meta_tiles(form, n, k)
    with compiling_for("sm_90"):
        for rows in PACKED_ROWS:
            linear(
                torch.empty(rows, k, dtype=torch.bfloat16, device="meta"), weight, tuning("sm_90")
            )
        ids = torch.empty(64, dtype=torch.int32, device="meta")
        embedding_rows(ids, weight, torch.bfloat16)


def dense_launches(rows: int) -> list[Launch]:
    if rows == 1:
        grid = [
            (1, 1024, 4),
            (1, 2048, 4),
            (2, 1024, 4),
            (2, 2048, 4),
            (4, 1024, 4),
            (4, 512, 4),
            (2, 2048, 8),
            (1, 4096, 8),
            (8, 512, 4),
            (4, 512, 2),
        ]
        return [Launch(block_n=n, block_k=k, warps=w, stages=s) for n, k, w in grid for s in (1, 3)]
    grid4 = [
        (16, 256, 4, 4),
        (16, 128, 4, 6),
        (32, 128, 4, 5),
        (32, 256, 4, 3),
        (64, 128, 4, 4),
        (32, 256, 8, 4),
        (16, 512, 4, 3),
        (64, 64, 4, 6),
    ]
    m = 16 if rows <= 16 else 32
    return [Launch(block_m=m, block_n=n, block_k=k, warps=w, stages=s) for n, k, w, s in grid4]


def label(launch: Launch) -> str:
    return f"m{launch.block_m} n{launch.block_n} k{launch.block_k} w{launch.warps} s{launch.stages}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--sweep", action="store_true", help="launches of BF16; tiles: `tiles.py`")
    parser.add_argument("--formats", default=FORMS)
    parser.add_argument("--processes", type=int, default=1, help="that compile packed formats")
    options = parser.parse_args()
    formats = options.formats.split(",")
    if options.processes > 1:
        jobs = [(form, n, k) for n, k in PACKED_SHAPES for form in formats if form != "BF16"]
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            pool.map(compile_packed, jobs, chunksize=1)
    torch.manual_seed(0)
    found = []
    for form in formats:
        if form == "BF16":
            for n, k in SHAPES:
                for rows in (1, 8, 32):
                    found.append(dense(rows, n, k, options.sweep and (n, k) in SHAPES[:4]))
        else:
            for n, k in PACKED_SHAPES:
                found += packed(form, n, k)
            if form in ("Q4_K", "Q6_K"):
                found += prefill(form, *PACKED_SHAPES[0]) + prefill(form, *PACKED_SHAPES[-1])
        torch.cuda.empty_cache()
        save(options.out, found)


if __name__ == "__main__":
    main()
