"""A tiny model on the bench: loaded, with a pool of its own, judged by the oracle's decoder."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import attrs
import numpy as np

from halogen_conformance.bench import Bench
from halogen_conformance.oracle.decoder import OracleDecoder
from halogen_conformance.oracle.formats import DENSE, SCALED, random_tensor
from halogen_conformance.oracle.numbers import EXACT, Arithmetic, Values
from halogen_conformance.oracle.operations import log_softmax
from halogen_conformance.oracle.sampling import Policy
from halogen_conformance.steps import Plan, batch_of, pool, sampling_batch, spans
from halogen_core.models import Decoder, config_of, kv_spec
from halogen_core.spi import Checkpoint, KVCache, SamplingBatch, StepBatch
from halogen_core.spi.testing import MemoryCheckpoint, tiny_checkpoint

WIDE = {"hidden": 256, "inner": 256, "layers": 1}
"""Rows long enough for every block format."""


@attrs.frozen(kw_only=True)
class Model:
    """A tiny model on the backend under test, with a pool of its own."""

    bench: Bench
    checkpoint: Checkpoint
    decoder: Decoder[Any]
    kv: KVCache
    block_size: int
    dtype: str

    def logits(self, batch: StepBatch) -> Values:
        """[R, V] of one step."""
        backend = self.bench.backend
        array = self.decoder.logits(backend.ops, backend.upload_step(batch), self.kv)
        return self.bench.download(array)

    def check(self, got: Values, tokens: Values, rows: Any, what: str) -> None:
        """Judge logits at positions `rows` of a sequence."""
        truth = oracle_logits(self.checkpoint, tokens)[rows]
        arithmetic = self._arithmetic()
        own = oracle_logits(self.checkpoint, tokens, arithmetic, self.dtype)[rows]
        length = len(self.decoder.config.layers) * self.decoder.config.hidden_size
        self.bench.compare(
            got, truth, own, what=what, length=length, rounded=bool(arithmetic.rounding), op="model"
        )
        self._record(got, truth)

    def _arithmetic(self) -> Arithmetic:
        """Of the format that its matrices have beside dense ones."""
        forms = {self.checkpoint.tensor(name).format for name in self.checkpoint.names()}
        return self.bench.arithmetic_for(next(iter(forms - set(DENSE)), "F32"))

    def _record(self, got: Values, truth: Values) -> None:
        """Divergence of the distributions, for people."""
        p, q = log_softmax(truth), log_softmax(np.asarray(got, np.float64))
        kl = float((np.exp(p) * (p - q)).sum(-1).max(initial=0))
        facts = self.bench.facts
        facts["kl"] = max(kl, facts.get("kl", 0.0))
        agree = float(np.mean(truth.argmax(-1) == got.argmax(-1))) if len(truth) else 1.0
        facts["top1"] = min(agree, facts.get("top1", 1.0))


_ORACLES: dict[tuple[str, Arithmetic, str], OracleDecoder] = {}


def oracle_logits(
    checkpoint: Checkpoint, tokens: Values, a: Arithmetic = EXACT, kv_dtype: str = ""
) -> Values:
    """Of every position; computed once for the same question."""
    key = (checkpoint.content_id, a, kv_dtype)
    if key not in _ORACLES:
        _ORACLES[key] = OracleDecoder(checkpoint=checkpoint, a=a, kv_dtype=kv_dtype)
    return _cached_logits(key, tokens.tobytes())


@cache
def _cached_logits(key: tuple[str, Arithmetic, str], raw: bytes) -> Values:
    return _ORACLES[key].logits(np.frombuffer(raw, np.int64))


@cache
def _checkpoint(model: str, quant: str | None) -> Checkpoint:
    if quant in SCALED:
        return with_scales(tiny_checkpoint(model, seed=5, **WIDE), quant)
    more: dict[str, Any] = WIDE if quant else {}
    return tiny_checkpoint(model, seed=5, quant=quant, **more)


def with_scales(checkpoint: MemoryCheckpoint, form: str) -> MemoryCheckpoint:
    """Its layers' matrices drawn anew in a format of `SCALED`; embedding and output stay as they
    are, as in such files."""
    rng = np.random.default_rng(zlib.crc32(form.encode()))
    tensors = dict(checkpoint.tensors)
    for name, tensor in tensors.items():
        if name.startswith("blk.") and len(tensor.shape) > 1 and "gate_inp" not in name:
            std = 1.5 * tensor.shape[-1] ** -0.5
            drawn = random_tensor(rng, tensor.shape, form, std=std)
            tensors[name] = attrs.evolve(drawn, name=name)
    return attrs.evolve(checkpoint, tensors=tensors)


def place(
    bench: Bench,
    model: str,
    *,
    quant: str | None = None,
    dtype: str | None = None,
    blocks: int = 24,
) -> Model:
    """Load a tiny model and allocate a pool for it."""
    claims = bench.capabilities
    if quant is not None:
        bench.require_format(quant)
    checkpoint = _checkpoint(model, quant)
    config = config_of(checkpoint)
    decoder = Decoder.load(config, checkpoint, bench.backend)
    kind = dtype or ("f32" if "f32" in claims.kv_dtypes else claims.kv_dtypes[0])
    size = 8 if 8 in claims.kv_block_sizes else claims.kv_block_sizes[0]
    kv = pool(bench, kv_spec(config, dtype=kind, block_size=size), blocks)
    return Model(
        bench=bench, checkpoint=checkpoint, decoder=decoder, kv=kv, block_size=size, dtype=kind
    )


@attrs.define(kw_only=True)
class Stretch:
    """Tokens and the blocks they live in."""

    tokens: Values
    table: list[int]


def sequences(model: Model, *tokens: Values) -> list[Stretch]:
    """Each with shuffled blocks of its own."""
    free = model.bench.rng.permutation(model.kv.num_blocks).tolist()
    out = []
    for ids in tokens:
        count = -(-len(ids) // model.block_size)
        out.append(Stretch(tokens=ids, table=[int(free.pop()) for _ in range(count)]))
    return out


def step(
    model: Model,
    parts: Sequence[tuple[Stretch, int, int]],
    *,
    every: bool = True,
    sampling: SamplingBatch | None = None,
    extra_columns: int = 1,
) -> StepBatch:
    """A step over (sequence, start, end) parts; logits of every row, or of each last one."""
    width = max(len(s.table) for s, _, _ in parts) + extra_columns
    tables = np.full((len(parts), width), -1, np.int32)
    for row, (sequence, _, end) in zip(tables, parts, strict=True):
        used = -(-end // model.block_size)
        row[:used] = sequence.table[:used]
    plan = Plan(
        spans=spans(*((end, end - start) for _, start, end in parts)),
        block_size=model.block_size,
        tables=tables,
        num_blocks=model.kv.num_blocks,
    )
    ids = np.concatenate([s.tokens[start:end] for s, start, end in parts])
    rows = np.arange(len(ids), dtype=np.int32) if every else None
    count = len(ids) if every else sum(end > start for _, start, end in parts)
    batch = sampling or sampling_batch([Policy()] * count, 97)
    return batch_of(plan, token_ids=ids, logit_rows=rows, sampling=batch)
