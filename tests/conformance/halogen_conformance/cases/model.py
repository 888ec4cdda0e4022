"""L3: whole tiny models against the oracle's teacher-forced logits, however a step is cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from halogen_conformance.bench import Bench, same_bits
from halogen_conformance.case import Case, Failure, Opening
from halogen_conformance.cases.attending import KV_DTYPES
from halogen_conformance.cases.placing import Model, Stretch, oracle_logits, place, sequences, step
from halogen_conformance.oracle.formats import ALL
from halogen_conformance.oracle.numbers import Values
from halogen_conformance.steps import pool
from halogen_core.models import Decoder, config_of, kv_spec
from halogen_core.spi import StepBatch
from halogen_core.spi.testing import TINY_MODELS, tiny_checkpoint

LENGTH = 37
FIRST = 4
"""Tokens of each sequence before steps are captured; later steps have fewer."""
GREEDY_MARGIN = 0.02
"""Tokens are compared only where the oracle's best two logits are further apart."""


def cases() -> Iterator[Case]:
    """All of them."""
    for model in TINY_MODELS:
        for name, run, why in (
            ("whole", whole, "any error of composition: order of norms, residuals, ropes"),
            ("chunked", chunked, "a chunk's positions or history are shifted"),
            ("decoded", decoded, "decode takes another path than prefill and differs"),
        ):
            yield _case(f"{name}/{model}", partial(run, model=model), why, model)
    for form in ALL:
        run = partial(whole, model="llama", quant=form)
        yield _case(f"formats/{form}", run, "a weight format that is wrong inside a model", form)
        if form in ("Q8_0", "Q4_K", "INT4", "MXFP4"):
            run = partial(whole, model="llama-moe", quant=form)
            yield _case(f"formats/moe-{form}", run, "experts of a quantised model", form)
    for dtype in KV_DTYPES:
        run = partial(stored, dtype=dtype)
        yield _case(f"kv/{dtype}", run, "a cache dtype that loses more than it may", dtype)
    checks = {
        "cached/prefix": (cached, "a cached prefix that answers differently from a cold one"),
        "cached/moved": (moved, "a cache that was exported and imported answers differently"),
        "batch/many-is-one": (many, "sequences in one step that reach each other"),
        "batch/padding": (idle, "idle sequences and wide tables that change the others"),
        "greedy/tokens": (greedy, "the runner's own steps, sampling included"),
        "capture/equals-eager": (captured, "a captured step that replays old inputs"),
        "capture/mixed-steps": (mixed, "one capture key for steps that a model composes otherwise"),
    }
    for name, (run, why) in checks.items():
        yield _case(name, run, why, "llama")
    for name, run in {
        "invariant/chunks": invariant_chunks,
        "invariant/company": invariant_company,
    }.items():
        yield _case(name, run, "claimed batch invariance that does not hold", "llama", True)
    yield Case(
        id="L3/ranks/two-is-one",
        topic="ranks",
        why="collectives are claimed that this SPI cannot call",
        run=ranks,
    )


def _case(name: str, run: Any, why: str, column: str, deterministic: bool = False) -> Case:
    return Case(
        id=f"L3/{name}",
        topic="model",
        why=why,
        run=run,
        column=column,
        opening=Opening(deterministic=deterministic),
    )


def _tokens(bench: Bench, count: int = LENGTH, vocab: int = 97) -> Values:
    return bench.rng.integers(0, vocab, count).astype(np.int64)


def whole(bench: Bench, *, model: str, quant: str | None = None) -> None:
    placed = place(bench, model, quant=quant)
    tokens = _tokens(bench)
    (sequence,) = sequences(placed, tokens)
    got = placed.logits(step(placed, [(sequence, 0, LENGTH)]))
    placed.check(got, tokens, slice(None), "all positions")
    # the last row alone takes the shorter way after the last attention
    (again,) = sequences(placed, tokens)
    last = placed.logits(step(placed, [(again, 0, LENGTH)], every=False))
    placed.check(last, tokens, slice(LENGTH - 1, None), "last position")


def stored(bench: Bench, *, dtype: str) -> None:
    name = "qwen3" if dtype != "q8_0" else "llama"
    if dtype == "q8_0":
        bench.require("q8_0" in bench.capabilities.kv_dtypes, "kv_dtypes:q8_0")
        placed = _wide_heads(bench)
    else:
        placed = place(bench, name, dtype=dtype)
    tokens = _tokens(bench)
    (sequence,) = sequences(placed, tokens)
    parts = [placed.logits(step(placed, [(sequence, a, b)])) for a, b in ((0, 20), (20, LENGTH))]
    placed.check(np.concatenate(parts), tokens, slice(None), f"with a cache of {dtype}")


def _wide_heads(bench: Bench) -> Model:
    """q8_0 needs head dims that are multiples of 32."""
    checkpoint = tiny_checkpoint("llama", seed=5, head_dim=32)
    config = config_of(checkpoint)
    size = bench.capabilities.kv_block_sizes[0]
    kv = pool(bench, kv_spec(config, dtype="q8_0", block_size=size), 16)
    decoder = Decoder.load(config, checkpoint, bench.backend)
    return Model(
        bench=bench, checkpoint=checkpoint, decoder=decoder, kv=kv, block_size=size, dtype="q8_0"
    )


def chunked(bench: Bench, *, model: str) -> None:
    placed = place(bench, model)
    tokens = _tokens(bench)
    (sequence,) = sequences(placed, tokens)
    cuts = (0, 1, 8, 15, 16, 29, LENGTH)
    parts = [placed.logits(step(placed, [(sequence, a, b)])) for a, b in itertools.pairwise(cuts)]
    placed.check(np.concatenate(parts), tokens, slice(None), "in chunks")


def decoded(bench: Bench, *, model: str) -> None:
    placed = place(bench, model)
    tokens = _tokens(bench)
    (sequence,) = sequences(placed, tokens)
    parts = [placed.logits(step(placed, [(sequence, 0, 6)]))]
    parts += [placed.logits(step(placed, [(sequence, i, i + 1)])) for i in range(6, LENGTH)]
    placed.check(np.concatenate(parts), tokens, slice(None), "one by one")


def cached(bench: Bench) -> None:
    placed = place(bench, "llama")
    tokens = _tokens(bench)
    other = np.concatenate([tokens[:16], _tokens(bench, LENGTH - 16)])
    first, second = sequences(placed, tokens, other)
    placed.logits(step(placed, [(first, 0, LENGTH)]))
    shared = 16 // placed.block_size
    if not shared:
        shared = 1
        second.tokens[: placed.block_size] = tokens[: placed.block_size]
    start = shared * placed.block_size
    second.table[:shared] = first.table[:shared]
    if start >= LENGTH:
        return
    warm = placed.logits(step(placed, [(second, start, LENGTH)]))
    placed.check(warm, second.tokens, slice(start, None), "after a cached prefix")


def moved(bench: Bench) -> None:
    placed = place(bench, "llama")
    tokens = _tokens(bench)
    (sequence,) = sequences(placed, tokens)
    placed.logits(step(placed, [(sequence, 0, 24)]))
    used = -(-24 // placed.block_size)
    blocks = bench.backend.kv_export(placed.kv, sequence.table[:used])
    free = [b for b in range(placed.kv.num_blocks) if b not in sequence.table]
    bench.backend.kv_import(placed.kv, free[:used], blocks)
    sequence.table[:used] = free[:used]
    got = placed.logits(step(placed, [(sequence, 24, LENGTH)]))
    placed.check(got, tokens, slice(24, None), "after moving its blocks")


def many(bench: Bench) -> None:
    placed = place(bench, "llama", blocks=48)
    lengths = (LENGTH, 1, 9, 24, 17)
    placed_sequences = sequences(placed, *(_tokens(bench, n) for n in lengths))
    starts = (30, 0, 8, 10, 0)
    for sequence, start in zip(placed_sequences, starts, strict=True):
        if start:
            placed.logits(step(placed, [(sequence, 0, start)]))
    parts = [(s, start, n) for s, start, n in zip(placed_sequences, starts, lengths, strict=True)]
    got = placed.logits(step(placed, parts))
    at = 0
    for index, (sequence, start, end) in enumerate(parts):
        rows = got[at : at + end - start]
        placed.check(rows, sequence.tokens, slice(start, end), f"sequence {index} of 5")
        at += end - start


def idle(bench: Bench) -> None:
    placed = place(bench, "llama", blocks=48)
    one, two = sequences(placed, _tokens(bench), _tokens(bench, 12))
    placed.logits(step(placed, [(two, 0, 12)]))
    batch = step(placed, [(two, 12, 12), (one, 0, LENGTH)], extra_columns=9)
    placed.check(placed.logits(batch), one.tokens, slice(None), "beside an idle sequence")


def greedy(bench: Bench) -> None:
    placed = place(bench, "qwen3")
    backend, tokens = bench.backend, _tokens(bench, 8)
    whole_table = sequences(placed, np.zeros(40, np.int64))[0].table
    for position in range(8, 32):
        sequence = Stretch(tokens=tokens, table=whole_table)
        start = 0 if position == 8 else position - 1
        batch = step(placed, [(sequence, start, position)], every=False)
        meta = backend.upload_step(batch)
        sampled = placed.decoder.step(backend.ops, meta, placed.kv)
        token = int(bench.download(sampled.token_ids)[0])
        truth = oracle_logits(placed.checkpoint, tokens)[-1]
        best = np.sort(truth)[-2:]
        if best[1] - best[0] > GREEDY_MARGIN and token != truth.argmax():
            raise Failure(f"token {position} is {token}, the oracle's {truth.argmax()}")
        tokens = np.append(tokens, token)


def captured(bench: Bench) -> None:
    placed = place(bench, "llama", blocks=48)
    backend = bench.backend
    pairs = sequences(placed, *(_tokens(bench) for _ in range(3)))
    for sequence in pairs:
        placed.logits(step(placed, [(sequence, 0, 20)]))

    def batch(position: int) -> StepBatch:
        parts = [(s, position, position + 1) for s in pairs]
        return step(placed, parts, every=False)

    key = backend.capture_key(batch(20))
    if key is None:
        if bench.capabilities.graph_capture:
            raise Failure("`graph_capture` is claimed, but no key for a decode step of 3")
        bench.require(False, "graph_capture")
    run = partial(placed.decoder.step, backend.ops, kv=placed.kv)
    replay = backend.capture(run, batch(20))
    if replay is None:
        raise Failure("a capture key was given, but `capture` gave up")
    for position in range(20, 30):
        if backend.capture_key(batch(position)) != key:
            continue
        got = bench.download(replay(batch(position)).token_ids)
        eager = bench.download(run(backend.upload_step(batch(position))).token_ids)
        same_bits(got, eager, f"replayed tokens at position {position}")


def mixed(bench: Bench) -> None:
    """Steps of decoding alone and of decoding beside chunks, each replayed where keys agree."""
    placed = place(bench, "llama", blocks=64)
    backend, run = bench.backend, partial(placed.decoder.step, bench.backend.ops, kv=placed.kv)
    replays: dict[Any, Any] = {}
    pairs = sequences(placed, *(_tokens(bench) for _ in range(8)))
    done = [0] * len(pairs)
    for counts in _mixes(bench, len(pairs)):
        parts = [
            (s, done[i], done[i] + n)
            for i, (s, n) in enumerate(zip(pairs, counts, strict=True))
            if n
        ]
        done = [a + n for a, n in zip(done, counts, strict=True)]
        batch = step(placed, parts, every=False)
        # the first step only fills the cache: decoding alone must be what is captured first
        key = backend.capture_key(batch) if max(counts) < FIRST else None
        if key is None:
            backend.download(run(backend.upload_step(batch)).token_ids)
            continue
        if key not in replays:
            replays[key] = backend.capture(run, batch)
        if replays[key] is not None:
            got = bench.download(replays[key](batch).token_ids)
            eager = bench.download(run(backend.upload_step(batch)).token_ids)
            same_bits(got, eager, f"replayed tokens of a step of {counts}")
    if not replays:
        bench.require(False, "graph_capture")


def _mixes(bench: Bench, count: int) -> Iterator[list[int]]:
    """New tokens of each sequence, step by step: first alone, then beside chunks of others."""
    yield [FIRST] * (count - 2) + [0, 0]
    for i in range(12):
        decode = [1] * (count - 2)
        yield [*decode, *([0, 0] if i % 3 == 0 else [int(bench.rng.integers(1, 4)), i % 2])]


def invariant_chunks(bench: Bench) -> None:
    bench.require(bench.capabilities.batch_invariant, "batch_invariant")
    placed = place(bench, "llama")
    tokens = _tokens(bench)
    one, other = sequences(placed, tokens, tokens)
    together = placed.logits(step(placed, [(one, 0, LENGTH)]))
    cuts = (0, 3, 16, 17, LENGTH)
    parts = [placed.logits(step(placed, [(other, a, b)])) for a, b in itertools.pairwise(cuts)]
    same_bits(np.concatenate(parts), together, "logits in chunks")


def invariant_company(bench: Bench) -> None:
    bench.require(bench.capabilities.batch_invariant, "batch_invariant")
    placed = place(bench, "llama", blocks=48)
    tokens = _tokens(bench)
    alone, again, *others = sequences(placed, tokens, tokens, _tokens(bench, 9), _tokens(bench, 20))
    expected = placed.logits(step(placed, [(alone, 0, LENGTH)]))
    parts = [(others[0], 0, 9), (again, 0, LENGTH), (others[1], 0, 20)]
    got = placed.logits(step(placed, parts))[9 : 9 + LENGTH]
    same_bits(got, expected, "logits in company")


def ranks(bench: Bench) -> None:
    claimed = bench.capabilities.collectives
    bench.require(bool(claimed), "collectives")
    raise Failure(f"collectives {claimed} are claimed; SPI 1.0 has no collective calls to test")
