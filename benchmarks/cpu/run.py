"""cpu_ggml beside llama.cpp on one file and as many threads, loads interleaved over HTTP.

    python benchmarks/cpu/run.py --all --minutes 25          # every part, most important first
    python benchmarks/cpu/run.py --model smollm2-q8_0 --parts decode,prefill
    python benchmarks/cpu/run.py --backend-option kernels=avx2 --out /tmp/avx2.json

`--all` skips what the result files already hold of the code as it is, starts nothing after
`--minutes`, and stops a part that takes too long, so it may be stopped and started at will. Most
parts need 20 to 90 s, 32 streams up to 300. Each instruction set has result files of its own.
`python benchmarks/cpu/kernels.py` measures single kernels against the machine's ceilings.
The peer is the prebuilt `xllamacpp`. Results: benchmarks/cpu/results/; the tables in the plugin's
README and in docs/explanation/cpu-kernels.md are written from them by
`python benchmarks/cpu/render.py`.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import models
from parts import PARTS, measure, summary
from serving import machine

from halogen_cpu_ggml import native

RESULTS = Path(__file__).parent / "results"
PART_S = {"streams_32": 420}
LONGEST_S = 200
"""Of the other parts."""
ROOT = Path(__file__).parents[2]
KERNELS = (ROOT / "plugins/cpu_ggml/csrc", ROOT / "plugins/cpu_ggml/halogen_cpu_ggml")
"""What all figures depend on; a start also on the core."""
QUICK = ("decode", "prefill", "streams_8")
Q4_1, Q4_K_M, Q8_0, F16, GEMMA = (
    "smollm2-q4_1", "smollm2-q4_k_m", "smollm2-q8_0", "smollm2-f16", "gemma3-270m",
)  # fmt: skip
MODELS = (Q4_1, F16, GEMMA, Q8_0, Q4_K_M)
PLAN = [
    *((model, "start") for model in MODELS),
    (F16, "streams_8"),
    *((model, part) for model in MODELS for part in QUICK),
    *((Q4_1, part) for part in ("depth", "shared_3k", "contended", "streams_32")),
    *((model, part) for part in ("shared_3k", "depth", "contended") for model in MODELS),
    *((model, "streams_32") for model in MODELS),
]


def isa(options):
    """The instruction set of the kernels that will run."""
    chosen = dict(option.split("=", 1) for option in options.backend_option).get("kernels", "auto")
    found = native.kernels(chosen)
    return found.isa if found else "ggml"


def result_file(options):
    if options.out:
        return Path(options.out)
    name = f"{Path(options.model).stem}-{options.threads}threads-{isa(options)}.json"
    return RESULTS / name


def code(part):
    """A digest of the sources that a part's figures depend on."""
    folders = (*KERNELS, ROOT / "halogen_core") if part == "start" else KERNELS
    digest = hashlib.sha256()
    for file in sorted(f for folder in folders for f in folder.rglob("*")):
        if file.suffix in (".c", ".h", ".py"):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def read(path):
    return json.loads(path.read_text()) if path.exists() else {"parts": {}}


def one(options, name, began):
    """Measure a part and put it into the result file at once."""
    left = options.seconds - (time.time() - began)
    samples, busy = measure(name, str(models.path_of(options.model)), options, left)
    target = result_file(options)
    result = read(target)
    result |= {
        "model": options.model, "origin": models.origin(options.model), "machine": machine(),
        "threads": options.threads, "kernels": isa(options),
        "peer": f"xllamacpp {version('xllamacpp')}",
    }  # fmt: skip
    result["parts"][name] = {
        "command": "python benchmarks/cpu/run.py " + " ".join(sys.argv[1:]),
        "code": code(name), "taken": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "load_1m": os.getloadavg()[0], "others_cores": busy,
        "backend_options": list(options.backend_option), "peer_flash": options.flash,
        "summary": summary(options.model, name, samples), "samples": samples,
    }  # fmt: skip
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")
    for figure, row in result["parts"][name]["summary"].items():
        print(options.model, name, figure, json.dumps(row), "others", busy, flush=True)


def everything(options):
    """The plan, a process per part."""
    began = time.time()
    for model, part in PLAN:
        if time.time() - began > options.minutes * 60:
            print(f"no time left for {model} {part}", flush=True)
            continue
        options.model = model
        known = read(result_file(options))["parts"].get(part)
        if known and known.get("code") == code(part):
            continue
        command = [sys.executable, __file__, "--model", model, "--parts", part]
        command += ["--threads", str(options.threads)]
        for option in options.backend_option:
            command += ["--backend-option", option]
        child = subprocess.Popen(command, start_new_session=True)
        try:
            child.wait(PART_S.get(part, LONGEST_S))
        except subprocess.TimeoutExpired:
            print(f"{model} {part}: took too long, stopped", flush=True)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGTERM)
                child.wait(20)


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--all", action="store_true", help="the whole plan")
    parser.add_argument("--minutes", type=float, default=25.0, help="of --all")
    parser.add_argument("--model", default=Q4_1, help=f"{', '.join(models.NAMES)}, or a file")
    parser.add_argument("--parts", default=",".join(QUICK), help=", ".join(PARTS))
    parser.add_argument("--seconds", type=float, default=150.0, help="no round starts after this")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend-option", action="append", default=[], help="of ours")
    parser.add_argument("--flash", default="auto", help="of the peer: auto, on, off")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    if options.all:
        everything(options)
        return
    began = time.time()
    for name in options.parts.split(","):
        one(options, name, began)


if __name__ == "__main__":
    main()
