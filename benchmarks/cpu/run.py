"""cpu_ggml beside llama.cpp on one file and as many threads, loads interleaved, ratios printed.

    python benchmarks/cpu/run.py                    # SmolLM2, all figures, about 8 minutes
    python benchmarks/cpu/run.py --quick            # the short loads only
    python benchmarks/cpu/run.py --kernels avx2     # our AVX2 kernels on an AVX-512 machine

The peer is the prebuilt `xllamacpp`, an AVX2 build. Results go to benchmarks/cpu/results/.
"""

import argparse
import json
import signal
import sys
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


def warm(servers):
    """Graphs are built and pages touched before anything counts."""
    for s in servers:
        load(s, np.random.default_rng(7).integers(*VOCABULARY, (8, 32)).tolist(), 8)


def measure(servers, name, deadline):
    """One load on each server in turn, round by round, as long as there is time."""
    samples = {s.name: [] for s in servers}
    for round_number in range(ROUNDS.get(name, 1)):
        if round_number and time.time() > deadline:
            break
        rng = np.random.default_rng([round_number, len(name)])
        job = loads(rng)[name]
        for s in servers if round_number % 2 == 0 else servers[::-1]:
            samples[s.name].append(load(s, *job))
    return samples


def row(name, by_server):
    """Medians and best rounds of the headline figure, our ratio to the peer, latencies."""
    field = HEADLINE[name]

    def over(key, pick):
        return {n: float(pick([r[key] for r in rs])) for n, rs in by_server.items()}

    median, best = over(field, np.median), over(field, max)
    out = {
        "figure": field,
        "median": median,
        "ratio": median["halogen"] / median["llama.cpp"],
        "best": best,
        "ratio_of_best_rounds": best["halogen"] / best["llama.cpp"],
        "ttft_p50_s": over("ttft_p50_s", np.median),
        "itl_p99_ms": over("itl_p99_ms", np.median),
    }
    print(name, json.dumps(out), flush=True)
    return out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--flash", default="auto", help="of the peer")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--minutes", type=float, default=7.0, help="start no load after this")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    path = options.model
    if not Path(path).exists():
        path = str(pull_model(path, Path.home() / ".cache/halogen/test-models"))
    result = {
        "machine": machine(), "model": Path(path).name, "threads": options.threads,
        "kernels": options.kernels, "peer_flash": options.flash, "summary": {}, "samples": {},
    }  # fmt: skip
    target = Path(options.out or RESULTS / f"{Path(path).stem}-{options.kernels}.json")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    servers, began = [], time.time()
    try:
        servers.append(halogen(path, options.threads, kernels=options.kernels))
        servers.append(llama(path, options.threads, slots=32, context=40960, flash=options.flash))
        warm(servers)
        for name in QUICK if options.quick else HEADLINE:
            if time.time() - began > options.minutes * 60:
                print(f"no time left for {name}", flush=True)
                continue
            result["samples"][name] = measure(servers, name, began + options.minutes * 60)
            result["summary"][name] = row(name, result["samples"][name])
            result["summary"]["cold_start_s"] = {s.name: s.cold_start_s for s in servers}
            result["summary"]["resident_mib"] = {s.name: s.resident_mib() for s in servers}
            target.parent.mkdir(exist_ok=True)
            target.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps({k: result["summary"][k] for k in ("cold_start_s", "resident_mib")}))
    finally:
        for s in servers:
            s.stop()


if __name__ == "__main__":
    main()
