"""L3: steps queued before the last one's tokens are known, for backends that run ahead."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs
import numpy as np

from halogen_conformance.bench import Bench, same_bits
from halogen_conformance.case import Case
from halogen_conformance.cases.placing import place, sequences, step
from halogen_core.spi import Carried, RunsAhead, Sampled, StepBatch

START, END = 20, 29
"""Positions that are decoded."""


def cases() -> Iterator[Case]:
    """All of them."""
    yield Case(
        id="L3/ahead/carried",
        topic="model",
        why="tokens that stay on the device reach the wrong row, or a step that came later",
        run=carried,
    )


def carried(bench: Bench) -> None:
    """The same greedy tokens whether each step is waited for or none before the last is queued."""
    placed = place(bench, "llama", blocks=48)
    backend = bench.backend
    bench.require(isinstance(backend, RunsAhead), "runs_ahead")
    tokens = (bench.rng.integers(0, 97, END) for _ in range(3))
    pairs = sequences(placed, *tokens)
    for sequence in pairs:
        placed.logits(step(placed, [(sequence, 0, START)]))
    run = partial(placed.decoder.step, backend.ops, kv=placed.kv)
    replays: dict[Any, Any] = {}

    def queue(batch: StepBatch) -> Sampled[Any]:
        key = backend.capture_key(batch)
        if key is not None and key not in replays:
            replays[key] = backend.capture(run, batch)
        replay = replays.get(key)
        return run(backend.upload_step(batch)) if replay is None else replay(batch)

    # in another order at each position, so that rows and sequences differ
    orders = [np.roll(np.arange(len(pairs)), p) for p in range(END - START)]
    batches = [
        step(placed, [(pairs[i], START + p, START + p + 1) for i in order], every=False)
        for p, order in enumerate(orders)
    ]
    expected = [bench.download(queue(batches[0]).token_ids)]
    for p in range(1, len(orders)):
        rows = np.argsort(orders[p - 1])[orders[p]]
        known = attrs.evolve(batches[p], token_ids=expected[-1][rows].astype(np.int32))
        expected.append(bench.download(queue(known).token_ids))
    before = queue(batches[0])
    waits = [backend.fetch(before)]
    for p in range(1, len(orders)):
        rows = np.argsort(orders[p - 1])[orders[p]].astype(np.int32)
        late = Carried(rows=rows, tokens=before.token_ids)
        unknown = np.full(len(pairs), -1, np.int32)
        before = queue(attrs.evolve(batches[p], token_ids=unknown, carried=late))
        waits.append(backend.fetch(before))
    for p, wait in enumerate(waits):
        same_bits(wait().token_ids, expected[p], f"tokens picked at position {START + p}")
