"""Draws of tokens from [R, 152064] logits: ours beside sorting in torch, in captured graphs.

    python benchmarks/gpu/sampling.py OUT.json

Every draw timed here is also compared with a float64 oracle that sorts (they may differ where the
number falls on a boundary). The peer sorts in float32 and draws in that order.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from timing import graph_time, median, save

from halogen_triton.sampling import FIELDS, DrawTensors, draw

VOCAB = 152064
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "uniforms": 0.3}
KINDS = {
    "plain": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "top_k 1000": {"top_k": 1000},
    "min_p 0.05": {"min_p": 0.05},
}


def logits_of(rows: int, shape: str) -> torch.Tensor:
    """`peaked`: a few dozen tokens hold most of the mass; `wide`: tens of thousands do."""
    x = torch.randn(rows, VOCAB, device="cuda") * 3
    if shape == "peaked":
        x += 16 * (torch.rand(rows, VOCAB, device="cuda") < 2e-4)
    return x


def fields_of(rows: int, given: dict[str, float]) -> DrawTensors:
    kinds = {name: torch.int32 if name == "top_k" else torch.float32 for name in FIELDS}
    full = {n: torch.full((rows,), given[n], dtype=kinds[n], device="cuda") for n in FIELDS}
    return DrawTensors(full)


def oracle(logits: torch.Tensor, given: dict[str, float]) -> torch.Tensor:
    """As `SamplingBatch` says, in float64."""
    x = logits.double() / given["temperature"]
    weights = (x - x.amax(1, keepdim=True)).exp()
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices
    ranked = weights.gather(1, order)
    if given["top_k"]:
        ranked[:, int(given["top_k"]) :] = 0
    if given["top_p"] < 1:
        before = ranked.cumsum(1) - ranked
        ranked[before >= given["top_p"] * ranked.sum(1, keepdim=True)] = 0
    kept = torch.zeros_like(weights).scatter_(1, order, ranked)
    kept[kept < given["min_p"]] = 0
    running = kept.cumsum(1)
    return torch.searchsorted(running, given["uniforms"] * running[:, -1:], right=True)[:, 0]


def sorted_draw(logits: torch.Tensor, given: dict[str, float]) -> torch.Tensor:
    """The usual way in float32: sort, cut, cumulate."""
    ranked, order = torch.sort(logits / given["temperature"], dim=1, descending=True)
    p = ranked.softmax(1)
    if given["top_k"]:
        p[:, int(given["top_k"]) :] = 0
    if given["top_p"] < 1:
        p[p.cumsum(1) - p >= given["top_p"] * p.sum(1, keepdim=True)] = 0
    p[p < given["min_p"] * p[:, :1]] = 0
    running = p.cumsum(1)
    at = torch.searchsorted(running, given["uniforms"] * running[:, -1:], right=True)
    return order.gather(1, at.clamp_max(VOCAB - 1))[:, 0]


def measure(shape: str, logits: torch.Tensor, name: str, joins: torch.Tensor) -> dict:
    """One kind of draw: alone, with a mask that allows all, and by the peer."""
    rows = len(logits)
    greedy, given = name == "greedy", {**NEUTRAL, **KINDS.get(name, {})}
    fields = DrawTensors() if greedy else fields_of(rows, given)
    words = torch.full((rows, VOCAB // 32), -1, dtype=torch.int32, device="cuda")
    masked = DrawTensors(fields.tensors, words)
    want = logits.argmax(1) if greedy else oracle(logits, given)
    got = draw(logits, fields, joins=joins, pdl=True)
    peer = (lambda: logits.argmax(1)) if greedy else (lambda: sorted_draw(logits, given))
    row = {
        "logits": shape,
        "rows": rows,
        "kind": name,
        "as_float64": int((got == want).sum()),
        "ours": times(lambda: draw(logits, fields, joins=joins, pdl=True)),
        "masked": times(lambda: draw(logits, masked, joins=joins, pdl=True)),
        "peer": times(peer),
    }
    us = {k: round(median(row[k]) * 1e6, 1) for k in ("ours", "masked", "peer")}
    print(shape, rows, name, us, f"{row['as_float64']} of {rows} as in float64", flush=True)
    return row


def times(call: Callable[[], object]) -> list[float]:
    return graph_time([call] * 4, repeats=7)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    options = parser.parse_args()
    torch.manual_seed(0)
    joins = torch.zeros(1 << 19, dtype=torch.int32, device="cuda")
    found = []
    for shape in ("peaked", "wide"):
        for rows in (1, 32):
            logits = logits_of(rows, shape)
            found += [measure(shape, logits, name, joins) for name in ("greedy", *KINDS)]
    save(options.out, found)


if __name__ == "__main__":
    main()
