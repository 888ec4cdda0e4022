"""cpu_ggml beside llama.cpp on one file and as many threads, loads interleaved, ratios printed.

    python benchmarks/cpu/run.py                    # SmolLM2, all figures, about 8 minutes
    python benchmarks/cpu/run.py --quick            # the short loads only
    python benchmarks/cpu/run.py --kernels avx2     # our AVX2 kernels on an AVX-512 machine

The peer is the prebuilt `xllamacpp`, an AVX2 build. Results go to benchmarks/cpu/results/.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from serving import halogen, llama, load, machine

from halogen_core.cli.pull import pull_model

RESULTS = Path(__file__).parent / "results"
VOCABULARY = (1000, 40000)
QUICK = ("decode", "prefill_512", "streams_8")


def loads(rng):
    """Name -> prompts (token ids, never seen before), tokens to generate, requests at a time."""

    def prompts(count, length):
        return rng.integers(*VOCABULARY, (count, length)).tolist()

    shared = prompts(1, 3072)[0]
    return {
        "decode": (prompts(1, 16), 96, None),
        "prefill_512": (prompts(1, 512), 1, None),
        "streams_8": (prompts(8, 128), 64, None),
        "depth_4096": (prompts(1, 4096), 32, None),
        "streams_32": (prompts(32, 512), 32, None),
        "shared_3k": ([shared + p for p in prompts(20, 16)], 16, 4),
    }


HEADLINE = {
    "decode": "decode_tok_s",
    "prefill_512": "prefill_tok_s",
    "streams_8": "total_tok_s",
    "depth_4096": "decode_tok_s",
    "streams_32": "total_tok_s",
    "shared_3k": "total_tok_s",
}
ROUNDS = {"decode": 5, "prefill_512": 5, "streams_8": 3, "depth_4096": 2}


def measure(servers, names):
    """Each load on each server in turn, round by round."""
    samples = {name: {s.name: [] for s in servers} for name in names}
    for s in servers:  # graphs are built and pages touched before anything counts
        load(s, np.random.default_rng(7).integers(*VOCABULARY, (8, 32)).tolist(), 8)
    for name in names:
        for round_number in range(ROUNDS.get(name, 1)):
            rng = np.random.default_rng([round_number, names.index(name)])
            job = loads(rng)[name]
            for s in servers if round_number % 2 == 0 else servers[::-1]:
                samples[name][s.name].append(load(s, *job))
    return samples


def summary(samples, servers):
    """Medians of the headline figure and our ratio to the best peer."""
    rows = {}
    for name, by_server in samples.items():
        field = HEADLINE[name]
        medians = {n: float(np.median([r[field] for r in rs])) for n, rs in by_server.items()}
        peer = max(v for n, v in medians.items() if not n.startswith("halogen"))
        ours = {n: v / peer for n, v in medians.items() if n.startswith("halogen")}
        best = {n: max(r[field] for r in rs) for n, rs in by_server.items()}
        undisturbed = best[next(iter(ours))] / max(v for n, v in best.items() if n not in ours)
        rows[name] = {"figure": field, "median": medians, "ratio": ours, "best": best}
        rows[name]["ratio_of_best_rounds"] = undisturbed
        first = {n: float(np.median([r["ttft_p50_s"] for r in rs])) for n, rs in by_server.items()}
        late = {n: float(np.median([r["itl_p99_ms"] for r in rs])) for n, rs in by_server.items()}
        rows[name] |= {"ttft_p50_s": first, "itl_p99_ms": late}
        print(name, field, {n: round(v, 1) for n, v in medians.items()},
              "ratio", {n: round(v, 2) for n, v in ours.items()},
              "of best rounds", round(undisturbed, 2), flush=True)  # fmt: skip
    rows["cold_start_s"] = {s.name: s.cold_start_s for s in servers}
    rows["resident_mib"] = {s.name: s.resident_mib() for s in servers}
    print("cold start s", rows["cold_start_s"], "resident MiB", rows["resident_mib"], flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--flash", default="auto", help="of the peer")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    path = options.model
    if not Path(path).exists():
        path = str(pull_model(path, Path.home() / ".cache/halogen/test-models"))
    names = list(QUICK if options.quick else HEADLINE)
    servers = []
    began = time.time()
    try:
        ours = halogen(path, options.threads, kernels=options.kernels)
        servers.append(ours)
        servers.append(llama(path, options.threads, slots=32, context=40960, flash=options.flash))
        samples = measure(servers, names)
        result = {
            "machine": machine(), "model": Path(path).name, "threads": options.threads,
            "kernels": options.kernels, "peer_flash": options.flash,
            "seconds": time.time() - began,
            "summary": summary(samples, servers), "samples": samples,
        }  # fmt: skip
    finally:
        for s in servers:
            s.stop()
    RESULTS.mkdir(exist_ok=True)
    target = options.out or RESULTS / f"{Path(path).stem}-{options.kernels}.json"
    Path(target).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
