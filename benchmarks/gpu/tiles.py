"""4-bit weights as tiles: launches for one row and for a few, correctness beside bandwidth.

python benchmarks/gpu/tiles.py OUT.json [--seconds 60]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator

import attrs
import torch
from timing import graph_time, median, save

from halogen_core.spi import FORMATS
from halogen_triton.launch import Launch, Rule, Tuning
from halogen_triton.linear import linear
from halogen_triton.planes import Planes, dequantise, repack, repack_groups
from halogen_triton.tiles import Tiles, tiled

SHAPES = [(27648, 5120), (5120, 27648), (37888, 3584), (3584, 18944)]
FORMS = ("Q4_K", "INT4", "Q4_0", "MXFP4")


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
        for at in (0,) if form == "Q4_0" else (0, 2):
            value = (torch.rand(len(raw), 1, device="cuda") * 0.01 + 0.003).half()
            raw[:, at : at + 2] = value.view(torch.uint8)
    return repack(form, raw, (n, k))


def copies(form: str, n: int, k: int) -> list[Tiles]:
    """As many as exceed the L2 cache several times."""
    first = tiled(planes(form, n, k))
    count = max(1, math.ceil(300e6 / first.nbytes))
    return [first] + [attrs.evolve(first, codes=first.codes.clone()) for _ in range(count - 1)]


def launches(n: int, rows: int) -> Iterator[tuple[Launch, int]]:
    """(launch, parts of K)."""
    m = 0 if rows == 1 else 8 if rows <= 8 else 16
    for block_n, warps in ((64, 2), (32, 2), (32, 1)):
        for split in (1, 2) if n > 20000 else (4, 8):
            yield Launch(block_m=m, block_n=block_n, warps=warps, stages=3), split


def table(launch: Launch, split: int, n: int) -> Tuning:
    rule = (Rule(launch=launch, programs=split * math.ceil(n / launch.block_n)),)
    rules = {"tile_gemv": rule, "tile_gemm": rule}
    return Tuning(arch="sweep", source="sweep", rules=rules, pdl=True)


def error(form: str, rows: int) -> float:
    """Largest error over the largest value, beside float64, on a small weight."""
    weight = planes(form, 1056, 1536)
    x = torch.randn(rows, 1536, device="cuda", dtype=torch.bfloat16)
    launch, split = next(launches(1056, rows))
    got = linear(x, tiled(weight), table(launch, split, 1056), out_dtype=torch.float32)
    want = x.double() @ dequantise(weight).double().T
    return float((got.double() - want).abs().max() / want.abs().max())


def bandwidth(weights: list[Tiles], rows: int, own: Tuning) -> list[float]:
    """GB/s of packed bytes."""
    x = torch.randn(rows, weights[0].shape[1], device="cuda", dtype=torch.bfloat16)
    samples = graph_time([lambda w=w: linear(x, w, own) for w in weights])
    return [weights[0].nbytes / s / 1e9 for s in samples]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)
    end = time.monotonic() + options.seconds
    found = []
    for form in FORMS:
        errors = {rows: error(form, rows) for rows in (1, 8, 16)}
        for n, k in SHAPES:
            weights = copies(form, n, k)
            for rows in (1, 8, 16):
                for launch, split in launches(n, rows):
                    if time.monotonic() > end:
                        break
                    rates = bandwidth(weights, rows, table(launch, split, n))
                    shape = {"format": form, "rows": rows, "n": n, "k": k, "split": split}
                    more = {"launch": attrs.asdict(launch), "error": errors[rows], "gbs": rates}
                    found.append({**shape, **more})
                    print(shape, launch.block_n, launch.warps, f"{median(rates):.0f}", flush=True)
            del weights
            torch.cuda.empty_cache()
    save(options.out, found)


if __name__ == "__main__":
    main()
