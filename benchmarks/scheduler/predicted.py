"""Predicted against real times of steps, on a real backend with a real model (B17).

    python benchmarks/scheduler/predicted.py MODEL.gguf [--backend cpu_ggml] [--json FILE]

A mixed load runs through the engine: prompts of 16 to 1,500 tokens in chunks beside answers. What
the backend would have said of each step is compared with what the engine then measured.
Reported are relative errors of single steps and of sums over ten (what time per token is made of).

The load runs through two engines in turns, step by step. "equal steps" is how far the same step of
one is from that of the other, over the square root of 2: the machine's own noise around one time,
which no model of shapes can predict.
"""

import argparse
import json
import platform
import random
import statistics
from pathlib import Path

from halogen_core.engine.building import build_engine
from halogen_core.engine.options import EngineOptions
from halogen_core.engine.protocol import GenerateRequest

WARM_UP = 32
"""Steps after which the model is taken to know the machine."""
LENGTHS = ((16, 128), (128, 600), (600, 1500))


def requests(count, vocabulary):
    rng = random.Random(5)
    for i in range(count):
        length = rng.randrange(*LENGTHS[i % 3])
        yield GenerateRequest(
            request_id=str(i),
            prompt_token_ids=[rng.randrange(vocabulary) for _ in range(length)],
            max_tokens=rng.randrange(20, 60),
            ignore_eos=True,
        )


def watched(backend, steps):
    """`backend.observe` that notes (shape, predicted seconds, real seconds) before it learns."""
    learn = backend.observe

    def observe(shape, seconds):
        cost = backend.cost(shape)
        steps.append((shape, cost and cost.p50, seconds))
        learn(shape, seconds)

    return observe


class Load:
    """All requests through one engine, a step at a time."""

    def __init__(self, options, count):
        self.engine = build_engine(options)
        self.steps = []
        self.engine.runner.backend.observe = watched(self.engine.runner.backend, self.steps)
        self.waiting = list(requests(count, self.engine.info.vocab_size))

    def step(self):
        """False: everything is answered."""
        scheduler = self.engine.scheduler
        while self.waiting and scheduler.num_running + scheduler.num_waiting < 6:
            self.engine.submit(self.waiting.pop())
        if self.engine.has_work:
            self.engine.step()
        return self.engine.has_work or bool(self.waiting)


def measure(options, count):
    """The steps of both engines; no clock decides what a step holds, so their shapes are equal."""
    loads = [Load(options, count) for _ in range(2)]
    while sum(load.step() for load in loads):
        pass
    for load in loads:
        load.engine.close()
    return [load.steps for load in loads]


def noise(first, second):
    """(one, other) seconds of equal steps, brought as near as the mean of many would be."""
    pairs = []
    for (shape, _, a), (same, _, b) in zip(first[WARM_UP:], second[WARM_UP:], strict=True):
        assert shape == same
        pairs.append((b + (a - b) / 2**0.5, b))
    return errors(pairs)


def errors(pairs):
    """Of predictions: mean and 95th percentile of |predicted - real| / real, and the bias."""
    relative = sorted(abs(p - r) / r for p, r in pairs)
    return {
        "count": len(relative),
        "mean": round(statistics.mean(relative), 3),
        "median": round(statistics.median(relative), 3),
        "p95": round(relative[int(0.95 * (len(relative) - 1))], 3),
        "bias": round(sum(p for p, _ in pairs) / sum(r for _, r in pairs) - 1, 3),
    }


def report(steps):
    known = [(shape, p, r) for shape, p, r in steps[WARM_UP:] if p]
    kinds = {
        "decode": [(p, r) for s, p, r in known if not s.prefill_tokens],
        "prefill": [(p, r) for s, p, r in known if s.prefill_tokens and not s.decode_sequences],
        "mixed": [(p, r) for s, p, r in known if s.prefill_tokens and s.decode_sequences],
        "all": [(p, r) for _, p, r in known],
    }
    tens = [
        tuple(map(sum, zip(*kinds["all"][i : i + 10], strict=True)))
        for i in range(0, len(kinds["all"]) - 9, 10)
    ]
    return {name: errors(pairs) for name, pairs in (kinds | {"sums of ten": tens}).items() if pairs}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="cpu_ggml")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path, help="write every step here")
    args = parser.parse_args()
    options = EngineOptions(
        model_path=str(args.model),
        model_id=args.model.stem,
        end_token_ids=[],
        backend=args.backend,
        threads=args.threads,
        max_batch_tokens=256,
        max_context=2048,
    )
    steps, again = measure(options, args.requests)
    result = {
        "model": args.model.name,
        "backend": args.backend,
        "machine": platform.machine(),
        "relative_error": report(steps) | {"equal steps": noise(steps, again)},
    }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if args.trace:
        rows = [(s.prefill_tokens, s.decode_sequences, s.kv_tokens, p, r) for s, p, r in steps]
        args.trace.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
