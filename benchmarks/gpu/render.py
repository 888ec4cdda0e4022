"""Write the tables of this folder's README from `results/`:  python benchmarks/gpu/render.py

Medians of the raw samples; every ratio is of two figures of one run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
BEGIN, END = "<!-- figures: begin (benchmarks/gpu/render.py) -->", "<!-- figures: end -->"


def results(name: str):
    return json.loads((HERE / "results" / f"{name}.json").read_text())["results"]


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    columns = head.split(" | ")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def decode() -> str:
    rows = []
    for row in results("attention")["decode"]:
        flash, cudnn = median(row["flash"]), median(row["cudnn"])
        ours = median(row["ours"]["shipped"]["us"])
        times = (flash, cudnn, row["limit_us"], ours)
        rows.append(
            [f"{row['batch']} × {row['length']:,}", *(f"{t:.1f}" for t in times),
             f"{cudnn / ours:.2f}"]
        )  # fmt: skip
    head = "B × L | SDPA flash | SDPA cuDNN | bytes / 4.58 TB/s | ours | cuDNN's time / ours"
    return "Decode attention, µs:\n\n" + table(head, rows)


def prefill() -> str:
    rows = []
    for row in results("attention")["prefill"]:
        rates = [median(row["flash"]), median(row["cudnn"])]
        rates += [median(row["ours"][name]["tflops"]) for name in ("triton", "shipped")]
        rows.append(
            [f"{row['length']:,}", *(f"{r:.0f}" for r in rates), f"{rates[-1] / rates[1]:.2f}"]
        )
    head = "tokens | SDPA flash | SDPA cuDNN | our Triton kernel | ours | ours / cuDNN"
    return "Prefill attention, causal, TFLOP/s:\n\n" + table(head, rows)


def dense() -> str:
    rows = [
        [f"{r['rows']} × {r['n']} × {r['k']}", f"{median(r['cublas']):,.0f}",
         f"{median(r['ours']['shipped']):,.0f}"]
        for r in results("linear_dense")
    ]  # fmt: skip
    title = "bf16 linear layers, GB/s of weight bytes:\n\n"
    return title + table("rows × N × K | cuBLAS | ours", rows)


def packed() -> str:
    by: dict[tuple[str, int, int], dict[int, str]] = {}
    for row in results("linear_packed"):
        if "tflops" not in row and row["rows"] <= 16:
            rates = by.setdefault((row["format"], row["n"], row["k"]), {})
            rates[row["rows"]] = f"{median(row['ours']['shipped']):,.0f}"
    rows = [
        [f, f"{n} × {k}", *(r.get(m, "–") for m in (1, 2, 8, 16))] for (f, n, k), r in by.items()
    ]
    title = "Packed linear layers by the launches we ship, GB/s of packed bytes, by rows:\n\n"
    return title + table("format | N × K | 1 | 2 | 8 | 16", rows)


def packed_prompts() -> str:
    rows = []
    for row in results("linear_packed"):
        if "tflops" in row:
            ours, peer = median(row["tflops"]), median(row["cublas_tflops"])
            shape = f"{row['rows']} × {row['n']} × {row['k']}"
            rows.append([row["format"], shape, f"{peer:.0f}", f"{ours:.0f}", f"{ours / peer:.2f}"])
    title = "Packed linear layers of many rows, TFLOP/s, beside cuBLAS on bf16 weights:\n\n"
    return title + table("format | rows × N × K | cuBLAS bf16 | ours | ratio", rows)


def model() -> str:
    rows = []
    for name, label in (
        ("model_bf16", "bf16"),
        ("model_bf16_wait", "bf16, each step waited for"),
        ("model_q4k", "Q4_K"),
    ):
        found = results(name)
        for row in found["rows"]:
            batch = row["batch"]
            steps = found["replay_ms"].items()
            step = next(ms for key, ms in steps if key.startswith(f"{batch} rows,"))
            rows.append(
                [label, str(batch), f"{row['tok_s']:,.0f}", f"{step:.2f}",
                 f"{median(row['short_s']) * 1e3:.1f}"]
            )  # fmt: skip
    title = (
        "The Qwen2.5-7B shape through the engine (seeded weights, 512-token prompts, greedy):\n\n"
    )
    text = title + table(
        "weights | batch | decode tok/s | captured step, ms | 512 + 8 tokens, ms", rows
    )
    for row in results("model_bf16")["serving"]:
        rate = median(row["tok_s"])
        text += (
            f"\n\n{row['requests']} requests of 512 in and 128 out, all at once: {rate:,.0f} tok/s."
        )
    return text


def sampling() -> str:
    rows = [
        [r["logits"], str(r["rows"]), r["kind"],
         *(f"{median(r[name]) * 1e6:.1f}" for name in ("ours", "masked", "peer"))]
        for r in results("sampling")
    ]  # fmt: skip
    title = "Sampling from 152,064 logits, µs (all draws as in float64; peer: torch ops):\n\n"
    return title + table("logits | rows | kind | ours | with a grammar's mask | peer", rows)


def main() -> None:
    path = HERE / "README.md"
    before, rest = path.read_text().split(BEGIN)
    after = rest.split(END)[1]
    parts = [decode(), prefill(), dense(), packed(), packed_prompts(), model(), sampling()]
    text = "\n\n".join(parts)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
