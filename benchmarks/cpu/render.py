"""Writes the table of ratios into the plugin's README from the result files."""

import json
from pathlib import Path

HERE = Path(__file__).parent
README = HERE.parents[1] / "plugins/cpu_ggml/README.md"
BEGIN, END = "<!-- figures: begin (benchmarks/cpu/render.py) -->", "<!-- figures: end -->"
ISAS = ("avx512", "avx2")
COLUMNS = ("smollm2-q4_1", "smollm2-q4_k_m", "smollm2-q8_0", "smollm2-f16", "gemma3-270m")
ROWS = {
    "decode.decode_tok_s": "decode, 1 stream",
    "contended.decode_tok_s": "decode, 2 busy processes beside",
    "depth.decode_tok_s": "decode at depth 4,096",
    "prefill.prefill_tok_s": "prefill 512",
    "depth.prefill_tok_s": "prefill 4,096",
    "streams_8.total_tok_s": "8 streams (128 in, 64 out)",
    "streams_8.ttft_p50_s": "8 streams, TTFT p50",
    "streams_8.itl_p99_ms": "8 streams, ITL p99",
    "streams_32.total_tok_s": "32 streams (512 in, 128 out)",
    "shared_3k.wall_s": "20 questions on one 3K prompt",
    "start.cold_start_s": "cold start to first token",
    "start.resident_mib": "resident memory, shared pages by parts",
    "start.rss_mib": "resident memory, summed over processes",
}
UNITS = {"s": "s", "ms": "ms", "mib": "MiB"}
KERNELS_DOC = HERE.parents[1] / "docs/explanation/cpu-kernels.md"


def results(isa, threads):
    files = {c: HERE / "results" / f"{c}-{threads}threads-{isa}.json" for c in COLUMNS}
    return {c: json.loads(f.read_text()) for c, f in files.items() if f.exists()}


def cell(result, key):
    part, figure = key.split(".")
    row = result["parts"].get(part, {}).get("summary", {}).get(figure)
    if row is None:
        return "–", None
    own = row["median"]["halogen"]
    value = f"{own:,.0f}" if own >= 100 else f"{own:.3g}"
    missed = row["target"] is not None and row["ratio"] < row["target"]
    return f"{'**' if missed else ''}{row['ratio']:.2f}{'**' if missed else ''} ({value})", row


def table(found):
    lines = ["| load (unit) | target | " + " | ".join(found) + " |"]
    lines.append("|---|---|" + "---|" * len(found))
    for key, title in ROWS.items():
        cells = [cell(r, key) for r in found.values()]
        targets = {row["target"] for _, row in cells if row}
        if not targets:
            continue
        wanted = " / ".join(f"{t:.2f}" for t in sorted(t for t in targets if t is not None)) or "–"
        unit = UNITS[key.rsplit("_", 1)[-1]] if not key.endswith("tok_s") else "tok/s"
        lines.append(f"| {title} ({unit}) | {wanted} | {' | '.join(c for c, _ in cells)} |")
    return lines


def text(isa, threads=2):
    """The table of the kernels of one instruction set, on the machine that they were taken on."""
    found = results(isa, threads)
    if not found:
        return f"**{isa}**: no figures have been taken yet."
    first = next(iter(found.values()))
    parts = [p for r in found.values() for p in r["parts"].values()]
    calm = [p for r in found.values() for n, p in r["parts"].items() if n != "contended"]
    busiest = max((p["others_cores"] or 0.0 for p in calm), default=0.0)
    taken = f"{min(p['taken'] for p in parts)} to {max(p['taken'] for p in parts)} UTC"
    cpu = f"{first['machine']['cpu']} with {first['machine']['cpus']} cores"
    head = [
        f"**Kernels: {isa}.** Ratio to llama.cpp's server ({first['peer']}): more is better for",
        f"us, also where less is faster; in brackets our own figure. {threads} threads each,",
        f"interleaved over HTTP, medians, {cpu} ({generation(first)}), {taken};",
        f"other processes took at most {busiest:.2f} cores. At depth the peer is the better of",
        "flash attention on and off. **Bold** misses its target.",
    ]
    return "\n".join([*head, "", *table(found)])


def generation(result):
    """What the CPU's instruction sets are, as its name does not tell."""
    return " ".join(result["machine"]["isa"])


def kernel_table(path):
    """Rows of kernels by step, with their share of what bounds them."""
    d = json.loads(path.read_text())
    top, threads = d["ceilings"], d["threads"]
    isa = d["kernels"]
    memory, int8, f32 = (
        top["read_gb_s"][1],
        threads * top[f"{isa}_int8"],
        threads * top[f"{isa}_f32"],
    )
    one, _ = top["read_gb_s"]
    lines = [
        f"**{isa}**, {d['model']}, {threads} threads, a CPU with {generation(d)};",
        f"ceilings measured beside it: reading {memory} GB/s (one thread {one}),",
        f"8-bit {int8} Gop/s, float {f32} Gop/s.", "",
        "| step | kernel | ms | GB/s | Gop/s | share of a ceiling |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for step, rows in d["steps"].items():
        for name, r in rows.items():
            if "gb_s" not in r:
                continue
            bound = f32 if name == "attention" else int8
            shares = {"memory": r["gb_s"] / memory, "arithmetic": r["gop_s"] / bound}
            best = max(shares, key=shares.get)
            share = f"{shares[best]:.0%} of {best}"
            lines.append(f"| {step} | {name} | {r['ms']} | {r['gb_s']} | {r['gop_s']} | {share} |")
        rest = sum(r["ms"] for r in rows.values() if "gb_s" not in r)
        lines.append(f"| {step} | all others | {rest:.2f} | | | |")
    return lines


def kernels_text():
    files = [HERE / "results" / f"kernels-{isa}.json" for isa in ISAS]
    return "\n".join("\n".join([*kernel_table(f), ""]) for f in files if f.exists())


def between(path, new):
    before, rest = path.read_text().split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{new}\n{END}{rest.split(END)[1]}")


def main():
    between(README, "\n\n".join(text(isa) for isa in ISAS))
    between(KERNELS_DOC, kernels_text())


if __name__ == "__main__":
    main()
