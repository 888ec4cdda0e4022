"""Steps without requests: every shape an engine may meet, over blocks that nobody owns yet.

For warming up (each kernel is compiled, each bucket captured, before anybody waits) and for timing
a step at a chosen context without computing that context first. Run it before the first request:
the blocks' contents are overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from halogen_core.engine.batch import BatchItem, Step, build_step
from halogen_core.engine.protocol import SamplingParams
from halogen_core.engine.sampler import RowSampler
from halogen_core.spi import KVCache, Limits

PROMPT = 33
"""Tokens of a prompt that no backend takes for a few decoded at once."""


@attrs.frozen(kw_only=True)
class Part:
    """One sequence's share: `count` tokens after `context` others."""

    context: int
    count: int = 1


@attrs.frozen(kw_only=True)
class StepKind:
    """A step by its shape."""

    parts: tuple[Part, ...]
    sampled: bool = False
    """Not greedy."""
    masked: bool = False
    """Grammars say which tokens are allowed."""

    @property
    def name(self) -> str:
        tokens = sum(part.count for part in self.parts)
        most = max(part.context + part.count for part in self.parts)
        how = ("sampled" if self.sampled else "greedy") + (", masked" if self.masked else "")
        return f"{tokens} tokens of {len(self.parts)} sequences at {most}, {how}"


def step_kinds(limits: Limits, *, max_batch: int, max_tokens: int, context: int) -> list[StepKind]:
    """The shapes to warm up: decode by bucket, prompts by length, and both together.

    Kernels are compiled per class of shape (1, multiples of 16, others) and per power of two of
    sequences, so powers of two and their neighbours stand for all.
    """
    most = min(max_batch, limits.max_sequences or max_batch)
    longest = min(max_tokens, limits.max_tokens or max_tokens, context)
    found = list(_decodes(limits, most, context))
    counts = [n for p in range(12) for n in (1 << p, (1 << p) + 1) if n < longest]
    for count in (*counts, longest):
        found.append(StepKind(parts=(Part(context=0, count=count),)))
    half = max(1, longest // 2 - 1)
    if most > 1:
        found.append(StepKind(parts=(Part(context=0, count=half),) * 2))
        found.append(StepKind(parts=(Part(context=context - half, count=half), Part(context=1))))
    found += _mixed(most, longest, context)
    return list(dict.fromkeys(found))


def _decodes(limits: Limits, most: int, context: int) -> Iterator[StepKind]:
    powers = tuple(1 << p for p in range(most.bit_length()))
    buckets = [b for b in (limits.token_buckets or powers) if b < most]
    for rows in (*buckets, most):
        for before in (1, context - 1):
            for sampled in (False, True):
                yield StepKind(parts=(Part(context=before),) * rows, sampled=sampled)
    for rows in (1, most):
        for sampled in (False, True):
            yield StepKind(parts=(Part(context=1),) * rows, sampled=sampled, masked=True)


def _mixed(most: int, longest: int, context: int) -> Iterator[StepKind]:
    """A prompt beside sequences that decode, at both ends of the context, by number of both."""
    for number in sorted({*(1 << p for p in range(1, most.bit_length())), most} - {1}):
        count = min(PROMPT, longest - number + 1)
        if count < 2:
            continue
        for before in (1, context - 1):
            others = (Part(context=before),) * (number - 1)
            yield StepKind(parts=(Part(context=0, count=count), *others))


def rehearse(kind: StepKind, kv: KVCache, *, vocab: int = 0) -> Step:
    """The step of that shape; sequences share blocks where the pool has too few.

    `vocab`: how many tokens a mask is about.
    """
    size, block = kv.num_blocks, kv.layout.spec.block_size
    sampling = SamplingParams(temperature=0.8, top_p=0.9) if kind.sampled else SamplingParams()
    sampler = RowSampler.start(sampling, [], seed=0)
    items, at = [], 0
    for part in kind.parts:
        length = part.context + part.count
        needs = -(-length // block)
        table = [(at + i) % size for i in range(needs)]
        at += needs
        items.append(_item(part, table, sampler))
    step = build_step(items, block)
    if not kind.masked:
        return step
    rows = len(step.batch.logit_rows)
    mask = np.full((rows, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
    sampled = attrs.evolve(step.batch.sampling, mask=mask)
    return attrs.evolve(step, batch=attrs.evolve(step.batch, sampling=sampled))


def _item(part: Part, table: Sequence[int], sampler: RowSampler) -> BatchItem:
    return BatchItem(
        token_ids=[0] * (part.context + part.count),
        start=part.context,
        count=part.count,
        block_table=table,
        sampler=sampler,
        samples=True,
    )
