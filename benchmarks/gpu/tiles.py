"""Packed weights as tiles: launches for one row and for a few, correctness beside bandwidth.

python benchmarks/gpu/tiles.py OUT.json [--seconds 60] [--formats Q4_K,Q6_K]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator

import attrs
import torch
from linear import PACKED_SHAPES, copies, gigabytes, planes, seconds
from timing import median, save

from halogen_triton.launch import Launch, Rule, Tuning
from halogen_triton.linear import linear
from halogen_triton.planes import dequantise
from halogen_triton.tiles import tiled

FORMS = "Q4_K,Q6_K,Q8_0,INT4,Q4_0,Q5_K,MXFP4"


def launches(n: int, k: int, rows: int) -> Iterator[tuple[Launch, int]]:
    """(launch, parts of K)."""
    m = 0 if rows == 1 else 8 if rows <= 8 else 16
    for block_n, warps in ((64, 4), (64, 2), (32, 2), (32, 1)):
        for split in (1, 2, 4, 8):
            if 330 <= split * n / block_n <= 2000 and split <= k // 1024:
                yield Launch(block_m=m, block_n=block_n, warps=warps, stages=3), split


def table(launch: Launch, split: int, n: int) -> Tuning:
    rule = (Rule(launch=launch, programs=split * math.ceil(n / launch.block_n)),)
    rules = {"tile_gemv": rule, "tile_gemm": rule}
    return Tuning(arch="sweep", source="sweep", rules=rules, pdl=True)


def error(form: str, rows: int) -> float:
    """Largest error over the largest value, beside float64, on a small weight."""
    weight = planes(form, 1056, 2048)
    x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
    m = 0 if rows == 1 else 8 if rows <= 8 else 16
    own = table(Launch(block_m=m, block_n=32, warps=2, stages=3), 2, 1056)
    got = linear(x, tiled(weight), own, out_dtype=torch.float32)
    want = x.double() @ dequantise(weight).double().T
    return float((got.double() - want).abs().max() / want.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--formats", default=FORMS)
    options = parser.parse_args()
    torch.manual_seed(0)
    end = time.monotonic() + options.seconds
    found = []
    for form in options.formats.split(","):
        errors = {rows: error(form, rows) for rows in (1, 8, 16)}
        print(form, "errors by rows", errors, flush=True)
        for n, k in PACKED_SHAPES:
            weights = copies(tiled(planes(form, n, k)))
            for rows in (1, 8, 16):
                x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
                for launch, split in launches(n, k, rows):
                    if time.monotonic() > end:
                        break
                    own = table(launch, split, n)
                    taken = seconds(lambda w, x=x, own=own: linear(x, w, own), weights)
                    rates = gigabytes(taken, weights[0].nbytes)
                    shape = {"format": form, "rows": rows, "n": n, "k": k, "split": split}
                    more = {"launch": attrs.asdict(launch), "error": errors[rows], "gbs": rates}
                    found.append({**shape, **more})
                    print(shape, launch.block_n, launch.warps, f"{median(rates):.0f}", flush=True)
            del weights
            torch.cuda.empty_cache()
        save(options.out, found)


if __name__ == "__main__":
    main()
