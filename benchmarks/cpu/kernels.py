"""Each kernel's share of the machine's ceilings, kernel by kernel within a model's own steps.

    python benchmarks/cpu/kernels.py [--threads N] [--kernels avx2] [--model NAME]

Ceilings are measured first (`ceiling.c`, compiled here): reading memory, multiplying. Then steps
are captured and every kernel of them is timed on its own (best of some runs, weights from memory).
"""

import argparse
import ctypes as C
import json
import subprocess
import tempfile
from pathlib import Path

import models
import numpy as np
from serving import machine

from halogen_core.engine.building import build_engine
from halogen_core.engine.options import EngineOptions
from halogen_core.spi import SamplingBatch, StepBatch, StepShape
from halogen_cpu_ggml import native

HERE = Path(__file__).parent
BLOCK = 16
STEPS = {
    "decode, 1 stream": [(1, 64)],
    "decode, 8 streams": [(1, 128)] * 8,
    "decode, depth 4,096": [(1, 4096)],
    "prefill 512": [(512, 512)],
}
RUNS = {"prefill 512": 3}


def ceilings(threads):
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "ceiling"
        source = HERE / "ceiling.c"
        subprocess.run(
            ["gcc", "-O2", "-march=native", "-pthread", source, "-o", program], check=True
        )
        done = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def greedy(rows):
    zeros, ones = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    none, start = np.zeros(0, np.int32), np.zeros(rows + 1, np.int32)
    return SamplingBatch(
        temperature=zeros, top_k=np.zeros(rows, np.int32), top_p=ones, min_p=zeros,
        repetition_penalty=ones, presence_penalty=zeros, frequency_penalty=zeros, uniforms=zeros,
        forced=np.full(rows, -1, np.int32), history_start=start, history_ids=none,
        history_counts=none, bias_start=start, bias_ids=none, bias_values=zeros[:0],
    )  # fmt: skip


def batch_of(sequences):
    """A step of (new tokens, length after) each."""
    new = np.array([n for n, _ in sequences])
    lengths = np.array([length for _, length in sequences], np.int32)
    start = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    blocks = -(-lengths // BLOCK)
    first = 1 + np.concatenate([[0], np.cumsum(blocks)[:-1]])
    tables = (first[:, None] + np.arange(blocks.max())).astype(np.int32)
    owner = np.repeat(np.arange(len(new)), new)
    positions = np.concatenate([np.arange(b - a, b) for a, b in sequences])
    slots = tables[owner, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    return StepBatch(
        token_ids=np.ones(start[-1], np.int32), positions=positions.astype(np.int32),
        slot_mapping=slots, query_start_loc=start, seq_lens=lengths, block_tables=tables,
        logit_rows=(start[1:] - 1).astype(np.int32), sampling=greedy(len(new)),
    )  # fmt: skip


def work(kernels, name, params, sequences):
    """What a kernel is called, the bytes it must read and the multiply-adds twice it must do."""
    if name == "linear":
        p = native.Linear.from_address(params)
        rows = C.c_int64.from_address(p.rows).value
        parts = (native.PartTiles * p.nparts).from_address(p.parts)
        names = list(native.FORMATS)
        tiles = [(-(-q.n // native.TILE), names[q.format]) for q in parts]
        nbytes = sum(n * kernels.tile_bytes(f, p.k) for n, f in tiles)
        n = sum(q.n for q in parts)
        return (
            f"linear {n}x{p.k} {'+'.join(sorted({f for _, f in tiles}))}",
            nbytes,
            2 * n * p.k * rows,
        )
    if name == "attend":
        p = native.Attend.from_address(params)
        pool = p.pool
        keys = sum(length for _, length in sequences)
        seen = sum(n * length - n * (n - 1) // 2 for n, length in sequences)
        return "attention", 2 * keys * pool.hkv * pool.v_row, 4 * seen * p.hq * pool.d
    return name, 0, 0


def profile(engine, sequences, runs):
    """Kernel -> [calls, seconds, bytes, operations] over one step, and the whole step's seconds."""
    batch = batch_of(sequences)
    tokens = int(batch.query_start_loc[-1])
    shape = StepShape(prefill_tokens=tokens, decode_sequences=len(sequences), kv_tokens=tokens)
    for _ in range(3):
        engine.runner.step(batch, shape)
    captured = engine.runner._replay(batch)
    kernels = engine.runner.backend.mode.ops.kernels
    fields = [n for n, t in native.Table._fields_ if t is C.c_void_p]
    names = {getattr(kernels.table, n): n for n in fields}
    found = {}
    for program in (k for k in captured.tape.keep if isinstance(k, native.Program)):
        took = (C.c_double * program.n)()
        kernels.library.hx_time_program(C.byref(program), C.c_int64(runs), took)
        ops = (native.Op * program.n).from_address(program.ops)
        for op, ns in zip(ops, took, strict=True):
            key, nbytes, ops_done = work(kernels, names[op.kernel], op.params, sequences)
            row = found.setdefault(key, [0, 0.0, 0, 0])
            for i, value in enumerate((1, ns / 1e9, nbytes, ops_done)):
                row[i] += value
    return found


def report(found):
    rows = {}
    for name, (calls, seconds, nbytes, done) in found.items():
        rows[name] = {"calls": calls, "ms": round(seconds * 1e3, 3)}
        if nbytes:
            rows[name] |= {
                "gb_s": round(nbytes / seconds / 1e9, 1), "gop_s": round(done / seconds / 1e9, 1),
            }  # fmt: skip
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--model", default="smollm2-q4_1")
    parser.add_argument("--out", default="", help="a file; else results/kernels-ISA.json")
    options = parser.parse_args()
    chosen = native.kernels(options.kernels)
    result = {
        "machine": machine(), "threads": options.threads, "kernels": chosen.isa,
        "model": options.model, "ceilings": ceilings(options.threads), "steps": {},
    }  # fmt: skip
    engine = build_engine(
        EngineOptions(
            model_path=str(models.path_of(options.model)),
            model_id="m",
            end_token_ids=[],
            backend="cpu_ggml",
            threads=options.threads,
            backend_options={"kernels": options.kernels},
        )
    )
    for name, sequences in STEPS.items():
        result["steps"][name] = report(profile(engine, sequences, RUNS.get(name, 15)))
    engine.close()
    text = json.dumps(result, indent=1)
    target = options.out or HERE / "results" / f"kernels-{chosen.isa}.json"
    Path(target).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
