"""Greedy tokens of a real model on the GPU beside plain torch on the CPU, captured beside eager.

    python benchmarks/gpu/identity.py MODEL.gguf|gemma3 OUT.json

`gemma3` is a seeded model with Gemma 3's layers (the real file is too large to carry around). Where
tokens part, the CPU's logits at that position must be a near tie (the GPU computes in bfloat16 or
float16). Captured steps must give eager tokens exactly, for every bucket.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from seeded_gemma3 import VOCAB, SeededGemma3
from timing import save

from halogen_core.engine.batch import BatchItem, build_step
from halogen_core.engine.protocol import SamplingParams
from halogen_core.engine.runner import Runner
from halogen_core.engine.sampler import RowSampler
from halogen_core.loader import load_tokenizer, open_model
from halogen_core.models import Decoder, config_of
from halogen_core.spi import BackendOptions, KVSpec, TorchBackend
from halogen_cuda.backend import CudaBackend

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "Water boils at a temperature of",
    "The three primary colours are",
    "List of planets in the solar system: Mercury,",
    "In the year 1969, the first",
    "Q: What is 12 + 30?\nA:",
)
NEAR_TIE = 0.15
"""Logits: rounding of activations to 8 bits of mantissa moves them by about as much."""
BLOCK = 16
PER = 8
"""Blocks of a sequence."""


class Session:
    def __init__(self, backend, checkpoint, kv_dtype: str, *, per: int = PER, most: int = 40):
        """With room for `most` sequences of `per` blocks."""
        self.per = per
        config = config_of(checkpoint)
        heads = config.layers[0].attention
        spec = KVSpec(
            num_layers=config.num_layers,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            dtype=kv_dtype,
            block_size=BLOCK,
        )
        decoder = Decoder.load(config, checkpoint, backend)
        self.runner = Runner(
            backend, decoder, backend.kv_alloc(backend.kv_layout(spec), per * most)
        )

    def batch(self, tokens, starts, params):
        items = [
            BatchItem(
                token_ids=t,
                start=s,
                count=len(t) - s,
                block_table=list(range(i * self.per, (i + 1) * self.per)),
                sampler=RowSampler.start(params, [], seed=i),
                samples=True,
            )
            for i, (t, s) in enumerate(zip(tokens, starts, strict=True))
        ]
        return build_step(items, BLOCK)

    def generate(self, prompts, new, params=None):
        params = params or SamplingParams()
        tokens = [list(p) for p in prompts]
        starts = [0] * len(tokens)
        for _ in range(new):
            made = self.batch(tokens, starts, params)
            ids = self.runner.step(made.batch, made.shape).token_ids
            starts = [len(t) for t in tokens]
            for t, i in zip(tokens, ids, strict=True):
                t.append(int(i))
        return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]

    def logits(self, tokens):
        made = self.batch([tokens], [0], SamplingParams())
        return self.runner.logits(made.batch)[0]


def compare(cpu: Session, prompts, want, got) -> dict:
    same, ties, worst = 0, 0, 0.0
    for prompt, a, b in zip(prompts, want, got, strict=True):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if at is None:
            same += 1
            continue
        row = cpu.logits([*prompt, *a[:at]])
        gap = float(row[a[at]] - row[b[at]])
        worst = max(worst, gap)
        ties += gap <= NEAR_TIE
    return {"prompts": len(prompts), "same": same, "near_ties": ties, "worst_gap": worst}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="a GGUF file, or `gemma3`")
    parser.add_argument("out")
    parser.add_argument("--new", type=int, default=48)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    if options.model == "gemma3":
        checkpoint, tokenizer = SeededGemma3(), None
        # longer than the window, so that local layers forget
        prompts = [rng.integers(0, VOCAB, n).tolist() for n in range(30, 62, 4)]
    else:
        checkpoint = open_model(Path(options.model))
        tokenizer = load_tokenizer(checkpoint)
        prompts = [list(tokenizer.encode(text)) for text in PROMPTS]
    cpu = Session(
        TorchBackend(BackendOptions(extra={"dtype": "f32"}), name="cpu"), checkpoint, "f32"
    )
    want = cpu.generate(prompts, options.new)
    found: dict = {"model": Path(options.model).name, "greedy": {}, "captured": {}}
    for dtype, kv in (
        ("f32", "f32"),
        ("f16", "f16"),
        ("bf16", "bf16"),
        ("bf16", "q8_0"),
        ("bf16", "f8_e5m2"),
    ):
        gpu = Session(CudaBackend(BackendOptions(extra={"dtype": dtype})), checkpoint, kv)
        result = compare(cpu, prompts, want, gpu.generate(prompts, options.new))
        found["greedy"][f"{dtype}, kv {kv}"] = result
        print(dtype, kv, result, flush=True)
    print(repr(tokenizer.decode(want[0])) if tokenizer else want[0], flush=True)
    graphs = Session(CudaBackend(BackendOptions(extra={"dtype": "bf16"})), checkpoint, "bf16")
    eager = Session(
        CudaBackend(BackendOptions(extra={"dtype": "bf16", "graphs": "off"})), checkpoint, "bf16"
    )
    for rows in (1, 2, 3, 4, 7, 8, 12, 16, 24, 32):
        many = [rng.integers(0, 8000, int(n)).tolist() for n in rng.integers(5, 60, rows)]
        for params in (SamplingParams(), SamplingParams(temperature=0.9, top_p=0.9, top_k=50)):
            a, b = graphs.generate(many, 12, params), eager.generate(many, 12, params)
            name = f"{rows} rows, {'greedy' if params.temperature == 0 else 'sampled'}"
            found["captured"][name] = a == b
            if a != b:
                print("captured differs from eager:", name, flush=True)
    counts = (graphs.runner.captured_steps, eager.runner.captured_steps)
    found["captured_steps"] = counts
    print(
        "captured = eager:",
        all(found["captured"].values()),
        len(found["captured"]),
        counts,
        flush=True,
    )
    save(options.out, found)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
