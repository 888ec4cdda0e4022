"""A converted model against its original: how far apart the answers are, and whether it stutters.

Weights only: activations of `w8a8` layers are not rounded here, so a backend may be further off.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from halogen_core.engine.batch import BatchItem, build_step
from halogen_core.engine.protocol import SamplingParams
from halogen_core.engine.runner import Runner
from halogen_core.engine.sampler import RowSampler
from halogen_core.errors import ModelError
from halogen_core.loader import open_model
from halogen_core.loader.int8 import PlainCheckpoint
from halogen_core.models import Decoder, config_of, kv_spec
from halogen_core.spi import BackendOptions, Checkpoint
from halogen_core.torch_backend import TorchBackend

PROMPT, ANSWER = 48, 48
MOST_DIVERGENCE = 0.1
"""Nats, mean over positions."""
MOST_REPETITION = 0.3
"""Share of repeated word triples that a conversion may add."""
_BLOCK = 16


@attrs.frozen(kw_only=True)
class Comparison:
    """Mean divergence of the next-token distributions, and shares of repeated triples."""

    divergence: float
    same_choice: float
    repetition: float
    original_repetition: float


def compare(source: Path, target: Path) -> Comparison:
    """Both models on one seeded text, then a greedy answer each."""
    first, second = (
        _Plain.load(open_model(source)),
        _Plain.load(PlainCheckpoint(open_model(target))),
    )
    text = np.random.default_rng(0).integers(0, first.vocab, PROMPT).tolist()
    p, q = (_log_softmax(model.logits(text)) for model in (first, second))
    divergence = float((np.exp(p) * (p - q)).sum(-1).mean())
    return Comparison(
        divergence=divergence,
        same_choice=float((p.argmax(-1) == q.argmax(-1)).mean()),
        repetition=_repetition(second.answer(text)),
        original_repetition=_repetition(first.answer(text)),
    )


def judge(found: Comparison, target: Path) -> None:
    """Raise `ModelError` (HRT-2015) when the converted model is too far from its original."""
    stutters = found.repetition > found.original_repetition + MOST_REPETITION
    if found.divergence <= MOST_DIVERGENCE and not stutters:
        return
    raise ModelError(
        f"`{target}` answers otherwise than its original: divergence {found.divergence:.3f} nats "
        f"(at most {MOST_DIVERGENCE:g}), repeated triples {found.repetition:.0%} against "
        f"{found.original_repetition:.0%}",
        code="HRT-2015",
        fix="keep ffn.w2, then attention.qkv, at fp16 with --quant-config",
    )


@attrs.frozen(eq=False)
class _Plain:
    """A model on the plain CPU backend, one sequence at a time."""

    runner: Runner[Any]
    vocab: int
    blocks: tuple[int, ...]

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> _Plain:
        backend, config = TorchBackend(BackendOptions()), config_of(checkpoint)
        decoder = Decoder.load(config, checkpoint, backend)
        count = -(-(PROMPT + ANSWER) // _BLOCK)
        layout = backend.kv_layout(kv_spec(config, dtype="f32", block_size=_BLOCK))
        runner = Runner(backend, decoder, backend.kv_alloc(layout, count))
        return cls(runner, config.vocab_size, tuple(range(count)))

    def logits(self, tokens: Sequence[int], *, start: int = 0) -> np.ndarray:
        """Of every position from `start` on: [T, V]."""
        sampler = RowSampler.start(SamplingParams(), tokens, seed=0)
        item = BatchItem(
            token_ids=tokens,
            start=start,
            count=len(tokens) - start,
            block_table=self.blocks,
            sampler=sampler,
            samples=True,
            prompt_logprobs=len(tokens),
        )
        return np.asarray(self.runner.logits(build_step([item], _BLOCK).batch))

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """Greedy tokens after `prompt`, whose keys and values are cached already."""
        tokens = list(prompt)
        row = self.logits(tokens)[-1]
        for _ in range(ANSWER):
            tokens.append(int(row.argmax()))
            row = self.logits(tokens, start=len(tokens) - 1)[-1]
        return tokens[len(prompt) :]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(-1, keepdims=True)))


def _repetition(tokens: Sequence[int]) -> float:
    triples = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return 1 - len(set(triples)) / len(triples)
