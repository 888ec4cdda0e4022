"""`halogen explain step`: what one step does on every core, from the plans alone.

The ops themselves are launched on a dry device: each task is planned, placed and timed, none is
computed and no weight exists, so a model of any size takes a second.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files

import attrs
import numpy as np

from halogen_ascend.options import SimOptions
from halogen_ascend.sim.backend import SimBackend
from halogen_ascend.sim.buffer import DeviceBuffer
from halogen_ascend.sim.collectives import ring_seconds
from halogen_ascend.sim.nz import nz_shape
from halogen_ascend.sim.timeline import OpSpan
from halogen_ascend.sim.weights import Vector, Weight
from halogen_core.spi import (
    Activation,
    AttentionSpec,
    ConfigError,
    KVSpec,
    PackedWeight,
    RopeSpec,
    SamplingBatch,
    StepBatch,
    StepMeta,
    WeightRole,
)

BLOCK = 128


@attrs.frozen(kw_only=True)
class Shape:
    """A dense decoder's sizes."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int

    def share(self, ranks: int) -> Shape:
        """What one of `ranks` parts holds; raises `ConfigError` where it cannot be divided evenly.

        The embedding and the head stay whole on every rank.
        """
        divided = {name: getattr(self, name) for name in ("heads", "kv_heads", "ffn")}
        odd = [f"{name} {value}" for name, value in divided.items() if value % ranks]
        if odd:
            raise ConfigError(
                f"{', '.join(odd)} do not divide over {ranks} ranks",
                code="HRT-7109",
                fix="choose --ranks that divides the KV heads",
            )
        return attrs.evolve(self, **{name: value // ranks for name, value in divided.items()})


@cache
def shapes() -> dict[str, Shape]:
    """Known models by name."""
    text = files("halogen_ascend").joinpath("shapes.toml").read_text(encoding="utf-8")
    return {name: Shape(**table) for name, table in tomllib.loads(text).items()}


def shape_called(name: str) -> Shape:
    """A known shape; raises `ConfigError` with the list."""
    if found := shapes().get(name):
        return found
    raise ConfigError(
        f"model shape `{name}` is unknown; known: {', '.join(shapes())}",
        code="HRT-7109",
        fix="choose one of these with --shape",
    )


@attrs.frozen(kw_only=True)
class Explained:
    """The spans of one layer, or of all of them, and what the whole step takes."""

    spans: tuple[OpSpan, ...]
    step_s: float
    """Seconds of the step with all layers."""
    layers_shown: int

    def of(self, op: str) -> OpSpan:
        """The first span of an op."""
        return next(span for span in self.spans if span.op == op)


@attrs.frozen(kw_only=True)
class StepSize:
    """`sequences`, each with `queries` new tokens and `context` in all; `layers` are drawn."""

    sequences: int = 1
    context: int = 8192
    queries: int = 1
    layers: int = 1
    ranks: int = 1
    """Parts that share every layer (tensor parallel); one of them is shown."""


def explain_step(options: SimOptions, shape: Shape, size: StepSize) -> Explained:
    """Plan one step."""
    backend = SimBackend.open(options)
    device, layers = backend.device, size.layers
    device.dry = True
    step = _Step(backend, shape.share(size.ranks), size)
    # made once per process, not per step
    backend.ops.rope.table(step.rope, size.context)
    device.timeline.watching = True
    started = device.now
    x = step.embed()
    layer_start = device.now
    for _ in range(layers):
        x = step.layer(x)
    per_layer = (device.now - layer_start) / layers
    step.head(x)
    whole = device.now - started + per_layer * (shape.layers - layers)
    return Explained(spans=tuple(device.timeline.spans), step_s=whole, layers_shown=layers)


class _Step:
    """One decoder step over weights that have sizes and no values."""

    def __init__(self, backend: SimBackend, shape: Shape, size: StepSize) -> None:
        self.backend, self.ops, self.ranks = backend, backend.ops, size.ranks
        c = shape
        self.rope = RopeSpec(dim=c.head_dim, inv_freq=(1.0,) * (c.head_dim // 2))
        self.spec = AttentionSpec(
            num_heads=c.heads,
            num_kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            scale=c.head_dim**-0.5,
            rope=self.rope,
        )
        batch = _batch(size.sequences, size.context, size.queries)
        layout = backend.kv_layout(
            KVSpec(num_layers=1, num_kv_heads=c.kv_heads, head_dim=c.head_dim, block_size=BLOCK)
        )
        self.kv = backend.kv_alloc(layout, batch.block_tables.size)
        self.meta: StepMeta[DeviceBuffer] = backend.upload_step(batch)
        self.table = self._matrix(c.vocab, c.hidden, WeightRole.EMBEDDING)
        self.norm = self._norm(c.hidden)
        heads = (c.heads + 2 * c.kv_heads) * c.head_dim
        self.qkv = self._matrix(heads, c.hidden)
        self.out = self._matrix(c.hidden, c.heads * c.head_dim)
        self.gate_up = self._matrix(2 * c.ffn, c.hidden)
        self.down = self._matrix(c.hidden, c.ffn)

    def embed(self) -> DeviceBuffer:
        return self.ops.embed(self.meta.token_ids, self.table)

    def layer(self, x: DeviceBuffer) -> DeviceBuffer:
        ops, meta = self.ops, self.meta
        qkv = ops.linear(ops.rms_norm(x, self.norm, eps=1e-6), self.qkv)
        q = ops.qkv_rope_store(qkv, self.kv, 0, meta, self.spec)
        y = self._sum(ops.linear(ops.attention(q, self.kv, 0, meta, self.spec), self.out))
        y, x = ops.add_rms_norm(y, x, self.norm, eps=1e-6)
        return ops.add(x, self._sum(ops.mlp(y, self.gate_up, self.down, Activation.SILU)))

    def head(self, x: DeviceBuffer) -> None:
        ops = self.ops
        rows = ops.rms_norm(ops.select_rows(x, self.meta), self.norm, eps=1e-6)
        ops.sample(ops.logits(rows, self.table), self.meta)

    def _sum(self, partial: DeviceBuffer) -> DeviceBuffer:
        """All ranks' partial results together."""
        if self.ranks > 1:
            self.backend.device.wait("all_reduce", ring_seconds(partial.nbytes, self.ranks))
        return partial

    def _matrix(
        self, n: int, k: int, role: WeightRole = WeightRole.LINEAR
    ) -> PackedWeight[DeviceBuffer]:
        device, dtype = self.backend.device, self.ops.compute
        linear = role is WeightRole.LINEAR
        shape = nz_shape(k, n, 2) if linear else (n, k)
        buffer = device.empty(shape, dtype, pool="static", layout="nz" if linear else "nd")
        buffer.allocation.written = None
        payload = Weight(device, buffer, n, k)
        return PackedWeight(
            payload=payload, shape=(n, k), nbytes=buffer.nbytes, format_id="dry", role=role
        )

    def _norm(self, size: int) -> PackedWeight[DeviceBuffer]:
        buffer = self.backend.upload(np.ones(size, np.float32))
        return PackedWeight(
            payload=Vector(buffer),
            shape=(size,),
            nbytes=buffer.nbytes,
            format_id="dry",
            role=WeightRole.NORM,
        )


def _batch(sequences: int, context: int, queries: int) -> StepBatch:
    width = -(-context // BLOCK)
    tables = np.arange(sequences * width, dtype=np.int32).reshape(sequences, width)
    positions = np.tile(np.arange(context - queries, context), sequences)
    owner = np.repeat(np.arange(sequences), queries)
    slots = tables[owner, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    starts = np.arange(sequences + 1, dtype=np.int32) * queries
    return StepBatch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=slots,
        query_start_loc=starts,
        seq_lens=np.full(sequences, context, np.int32),
        block_tables=tables,
        logit_rows=starts[1:] - 1,
        sampling=_greedy(sequences),
    )


def _greedy(rows: int) -> SamplingBatch:
    zeros, empty = np.zeros(rows, np.float32), np.zeros(0, np.int32)
    return SamplingBatch(
        temperature=zeros,
        top_k=np.zeros(rows, np.int32),
        top_p=zeros + 1,
        min_p=zeros,
        repetition_penalty=zeros + 1,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        uniforms=zeros,
        forced=np.full(rows, -1, np.int32),
        history_start=np.zeros(rows + 1, np.int32),
        history_ids=empty,
        history_counts=empty,
        bias_start=np.zeros(rows + 1, np.int32),
        bias_ids=empty,
        bias_values=np.zeros(0, np.float32),
    )
