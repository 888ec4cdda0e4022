"""GEMV and small GEMM: ours beside cuBLAS, bytes of weights over time, in captured graphs.

python benchmarks/gpu/linear.py OUT.json [--sweep]
"""

from __future__ import annotations

import argparse
import math

import attrs
import torch
from timing import graph_time, median, save

from halogen_core.spi import FORMATS
from halogen_triton.launch import Launch, Rule, tuning
from halogen_triton.linear import linear
from halogen_triton.packing import arranged
from halogen_triton.planes import Planes, repack
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
QUANT = [(27648, 5120), (5120, 27648), (37888, 3584), (3584, 18944)]


def weights(form: str, n: int, k: int) -> list[torch.Tensor | Planes | Tiles]:
    nbytes = n * k * 2 if form == "BF16" else FORMATS[form].nbytes(n * k)
    count = max(1, min(12, math.ceil(300e6 / nbytes)))
    if form == "BF16":
        return [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    fmt = FORMATS[form]
    made = []
    for _ in range(count):
        raw = torch.randint(
            0, 256, (n * k // fmt.block, fmt.bytes), device="cuda", dtype=torch.uint8
        )
        for at in {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}.get(form, (0, 2)):
            raw[:, at : at + 2] = torch.full((1,), 0.01, dtype=torch.float16, device="cuda").view(
                torch.uint8
            )
        made.append(arranged(repack(form, raw, (n, k)), tuning("sm_90"), torch.bfloat16))
    return made


def rate(
    form: str, rows: int, n: int, k: int, launch: Launch | None, ws: list, pdl: bool = True
) -> list[float]:
    """GB/s of packed weight bytes."""
    base = tuning("sm_90")
    kind = ("dense" if form == "BF16" else "plane") + ("_gemv" if rows == 1 else "_gemm")
    table = attrs.evolve(base, pdl=pdl)
    if launch is not None:
        table = attrs.evolve(table, rules={**base.rules, kind: (Rule(launch=launch),)})
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    samples = graph_time([lambda w=w: linear(x, w, table) for w in ws])
    return [ws[0].nbytes / s / 1e9 for s in samples]


def gemv_launches(form: str) -> list[Launch]:
    if form == "BF16":
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
    else:
        grid = [
            (1, 1024, 1),
            (2, 1024, 1),
            (4, 1024, 1),
            (8, 1024, 1),
            (2, 2048, 2),
            (4, 2048, 2),
            (4, 2048, 4),
            (4, 4096, 4),
            (8, 1024, 2),
            (16, 1024, 4),
            (2, 4096, 4),
            (1, 4096, 4),
            (8, 4096, 4),
            (8, 2048, 2),
            (16, 1024, 1),
        ]
    return [
        Launch(block_n=n, block_k=k, warps=w, stages=s)
        for n, k, w in grid
        for s in ((1,) if form != "BF16" else (1, 3))
    ]


def gemm_launches(form: str, rows: int) -> list[Launch]:
    m = 16 if rows <= 16 else 32
    if form == "BF16":
        grid = [
            (16, 256, 4, 4),
            (16, 128, 4, 6),
            (32, 128, 4, 5),
            (32, 256, 4, 3),
            (64, 128, 4, 4),
            (32, 256, 8, 4),
            (16, 512, 4, 3),
            (64, 64, 4, 6),
        ]
    else:
        grid = [
            (16, 256, 4, 3),
            (32, 256, 4, 3),
            (64, 256, 4, 3),
            (32, 512, 4, 2),
            (32, 256, 8, 3),
            (64, 512, 8, 2),
            (128, 128, 4, 3),
        ]
    return [Launch(block_m=m, block_n=n, block_k=k, warps=w, stages=s) for n, k, w, s in grid]


def label(launch: Launch) -> str:
    return f"m{launch.block_m} n{launch.block_n} k{launch.block_k} w{launch.warps} s{launch.stages}"


def run(form: str, rows: int, n: int, k: int, sweep: bool) -> dict:
    ws = weights(form, n, k)
    row: dict = {"format": form, "rows": rows, "n": n, "k": k, "bytes": ws[0].nbytes, "ours": {}}
    row["ours"]["shipped"] = rate(form, rows, n, k, None, ws)
    row["ours"]["shipped no pdl"] = rate(form, rows, n, k, None, ws, pdl=False)
    # launches of tiles: `tiles.py`
    if sweep and not isinstance(ws[0], Tiles):
        for launch in gemv_launches(form) if rows == 1 else gemm_launches(form, rows):
            try:
                row["ours"][label(launch)] = rate(form, rows, n, k, launch, ws)
            except Exception as exc:  # out of resources is a result
                row["ours"][label(launch)] = str(exc)[:100]
    if form == "BF16":
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        samples = graph_time([lambda w=w: torch.nn.functional.linear(x, w) for w in ws])
        row["cublas"] = [ws[0].nbytes / s / 1e9 for s in samples]
    best = sorted(
        ((median(v), key) for key, v in row["ours"].items() if isinstance(v, list)), reverse=True
    )
    peer = f" cublas {median(row['cublas']):.0f}" if "cublas" in row else ""
    print(f"{form} {rows}x{n}x{k}{peer}", *(f"{t:.0f}:{key}" for t, key in best[:4]),
          f"shipped {median(row['ours']['shipped']):.0f}", flush=True)  # fmt: skip
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--formats", default="BF16,Q4_K,Q4_0,Q6_K,Q8_0")
    options = parser.parse_args()
    torch.manual_seed(0)
    formats = options.formats.split(",")
    found = [
        run("BF16", rows, n, k, options.sweep and (n, k) in SHAPES[:4])
        for n, k in SHAPES
        for rows in (1, 8, 32)
        if "BF16" in formats
    ]
    torch.cuda.empty_cache()
    for form in formats:
        if form == "BF16":
            continue
        for n, k in QUANT:
            found.append(
                run(form, 1, n, k, options.sweep and (n, k) in QUANT[1:3] and form != "Q4_0")
            )
        found.append(run(form, 8, 37888, 3584, options.sweep and form == "Q4_K"))
        torch.cuda.empty_cache()
    save(options.out, found)


if __name__ == "__main__":
    main()
