"""Greedy tokens of a model's file: what CPU backends pick, written down, and a GPU beside that.

    python benchmarks/gpu/greedy.py expect MODEL.gguf EXPECTED.json [--new 64]
    python benchmarks/gpu/greedy.py check MODEL.gguf EXPECTED.json OUT.json [--backend cuda]

`expect` runs where the CPU backends are; what it writes is committed in `expected/`: the prompts'
tokens, and for each token picked how far the logits of others are behind, so that `check` needs the
model's file and nothing else. A token that differs must be a near tie; its sequence goes on from
what was expected, so every position counts. `check` exits with 1 where one differs by more, or is
no token at all because logits were not finite (float16 and Gemma 3).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from identity import BLOCK, PROMPTS, Session
from timing import save

from halogen_core.engine.protocol import SamplingParams
from halogen_core.loader import load_tokenizer, open_model
from halogen_core.spi import BackendOptions

COUNTING = " ".join(f"{n} times {n} is {n * n}." for n in range(1, 90))
LONG = 640
"""Tokens of the prompt that is longer than Gemma 3's window (512)."""
FACTORIES = {
    "cpu_reference": "halogen_cpu_reference.backend",
    "cpu_ggml": "halogen_cpu_ggml.backend",
    "cuda": "halogen_cuda.backend",
}
ORACLES = {"cpu_reference": ("f32", "f32"), "cpu_ggml": (None, "f32")}
"""CPU backends and their dtypes of activations (None: its own) and of the cache."""
NEAR_TIE = {"f32": 0.02, "f16": 0.15, "bf16": 0.3}
"""Logits. bfloat16 keeps 8 bits, of logits near 30 a tenth, and two of them are compared."""
CLOSE = 0.5
"""Logits: others so near to the picked one are written down."""


@attrs.frozen
class Pick:
    """A token and which others were near: [token, logits behind it], the runner-up always."""

    token: int
    behind: list[list[float]]

    def gap_to(self, other: int) -> float | None:
        """Logits that `other` is behind; None: more than `CLOSE` and not the runner-up."""
        return next((gap for token, gap in self.behind if token == other), None)


def picks_of(session: Session, prompts: Sequence[list[int]], new: int) -> list[list[Pick]]:
    """Greedy picks of prompts, by logits of one batch."""
    tokens, starts = [list(prompt) for prompt in prompts], [0] * len(prompts)
    found: list[list[Pick]] = [[] for _ in prompts]
    for _ in range(new):
        made = session.batch(tokens, starts, SamplingParams())
        starts = [len(own) for own in tokens]
        for own, picks, row in zip(tokens, found, session.runner.logits(made.batch), strict=True):
            order = np.argpartition(row, -6)[-6:]
            order = order[row[order].argsort()[::-1]]
            behind = [[int(i), round(float(row[order[0]] - row[i]), 4)] for i in order[1:]]
            near = [entry for entry in behind if entry[1] <= CLOSE]
            picks.append(Pick(int(order[0]), near or behind[:1]))
            own.append(picks[-1].token)
    return found


def partings(
    session: Session, prompts: Sequence[list[int]], want: Sequence[list[Pick]]
) -> Iterator[dict[str, Any]]:
    """Where greedy tokens of one batch differ from the expected ones, with which all go on."""
    tokens, starts = [list(prompt) for prompt in prompts], [0] * len(prompts)
    for at in range(len(want[0])):
        made = session.batch(tokens, starts, SamplingParams())
        got = session.runner.step(made.batch, made.shape).token_ids
        starts = [len(own) for own in tokens]
        for prompt, (own, picks) in enumerate(zip(tokens, want, strict=True)):
            if (token := int(got[prompt])) != picks[at].token:
                yield {"prompt": prompt, "at": at, "token": token, "gap": picks[at].gap_to(token)}
            own.append(picks[at].token)


def opened(
    name: str, checkpoint: Any, dtype: str | None, kv: str, longest: int, most: int
) -> Session:
    """A session with room for `most` sequences of `longest` tokens."""
    extra = {} if dtype is None else {"dtype": dtype}
    backend = import_module(FACTORIES[name]).create(BackendOptions(extra=extra))
    return Session(backend, checkpoint, kv, per=-(-longest // BLOCK), most=most)


def expect(model: Path, out: Path, new: int) -> None:
    checkpoint = open_model(model)
    tokenizer = load_tokenizer(checkpoint)
    prompts = [tokenizer.encode_prompt(text) for text in PROMPTS]
    prompts.append(tokenizer.encode_prompt(COUNTING)[:LONG])
    found: dict[str, Any] = {
        "model": model.name,
        "bytes": model.stat().st_size,
        "command": f"benchmarks/gpu/greedy.py expect {model.name} {out.name} --new {new}",
        "prompts": prompts,
    }
    for name, (dtype, kv) in ORACLES.items():
        session = opened(name, checkpoint, dtype, kv, max(map(len, prompts)) + new, len(prompts))
        picks = picks_of(session, prompts, new)
        found[name] = [[[pick.token, pick.behind] for pick in own] for own in picks]
        session.runner.close()
        for own in picks:
            print(name, repr(tokenizer.decode([pick.token for pick in own])), flush=True)
    text = json.dumps(found, separators=(",", ":")).replace("]]],[[", "]]],\n[[")
    out.write_text(text.replace('],"', '],\n"') + "\n", encoding="utf-8")


def check(model: Path, expected: Path, out: Path, backend: str, runs: Sequence[str]) -> bool:
    """Whether every run gives the reference's tokens or near ties."""
    stored = json.loads(expected.read_text(encoding="utf-8"))
    if model.stat().st_size != stored["bytes"]:
        raise SystemExit(
            f"{model} has {model.stat().st_size} bytes, {expected} was made of {stored['model']}"
            f" with {stored['bytes']}; give that file, or make {expected.name} anew with `expect`"
        )
    prompts, checkpoint, found = stored["prompts"], open_model(model), {}
    for dtype in runs:
        for name in ORACLES:
            want = [[Pick(*pick) for pick in own] for own in stored[name]]
            longest = max(map(len, prompts)) + len(want[0])
            session = opened(backend, checkpoint, dtype, dtype, longest, len(prompts))
            apart = list(partings(session, prompts, want))
            alone = [
                one | {"prompt": i, "alone": True}
                for i, (prompt, own) in enumerate(zip(prompts, want, strict=True))
                for one in partings(session, [prompt], [own])
            ]
            bound = NEAR_TIE[dtype]
            lost = [p for p in apart + alone if p["token"] < 0]
            far = [
                p
                for p in apart + alone
                if p["token"] >= 0 and (p["gap"] is None or p["gap"] > bound)
            ]
            found[f"{dtype} beside {name}"] = {
                "positions": 2 * len(prompts) * len(want[0]),
                "differ": len(apart) + len(alone),
                "not_finite": len(lost),
                "near_tie": bound,
                "more_than_near_ties": far,
                "worst_gap": max((p["gap"] or 0.0 for p in apart + alone), default=0.0),
                "captured_steps": session.runner.captured_steps,
            }
            session.runner.close()
            print(dtype, name, found[f"{dtype} beside {name}"], flush=True)
    save(str(out), {"model": stored["model"], "backend": backend, "runs": found})
    references = [found[f"{dtype} beside cpu_reference"] for dtype in runs]
    return not any(one["more_than_near_ties"] or one["not_finite"] for one in references)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("expect", "check"):
        command = commands.add_parser(name)
        command.add_argument("model", type=Path)
        command.add_argument("expected", type=Path)
        if name == "expect":
            command.add_argument("--new", type=int, default=64)
        else:
            command.add_argument("out", type=Path)
            command.add_argument("--backend", choices=FACTORIES, default="cuda")
            command.add_argument("--runs", default="f32,f16,bf16")
    options = parser.parse_args()
    if options.command == "expect":
        expect(options.model, options.expected, options.new)
    elif not check(
        options.model, options.expected, options.out, options.backend, options.runs.split(",")
    ):
        sys.exit(1)


if __name__ == "__main__":
    main()
