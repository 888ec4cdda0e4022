"""`cpu_ggml`: the core's ops as ggml graphs, with kernels of our own where they win."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_core.spi import (
    FLOAT8,
    BackendOptions,
    Capabilities,
    Conversions,
    Cost,
    KVBlocks,
    KVCache,
    KVLayout,
    KVSpec,
    Limits,
    LinearCost,
    MemoryPlan,
    MemoryRequest,
    MemoryTier,
    OpSignature,
    OutOfDeviceMemory,
    PackedWeight,
    Placement,
    QuantTensor,
    Replay,
    Sampled,
    StepBatch,
    StepMeta,
    StepShape,
    Support,
    Telemetry,
    WeightRole,
    check_block_ids,
    check_kv_blocks,
)
from halogen_cpu_ggml import binding, memory, weights
from halogen_cpu_ggml.inputs import Capacity, StepInputs
from halogen_cpu_ggml.kernel_mode import KernelMode
from halogen_cpu_ggml.locking import Locks, locked_bytes
from halogen_cpu_ggml.modes import GgmlMode, Mode
from halogen_cpu_ggml.ops import GgmlOps
from halogen_cpu_ggml.recorder import Recorder, joined, weight_tensor
from halogen_cpu_ggml.settings import Settings
from halogen_cpu_ggml.step import Captured, bucket, record
from halogen_cpu_ggml.tape import Node, SharedArena, host_node, view_f32
from halogen_cpu_ggml.threads import Team
from halogen_cpu_ggml.tiles import Tables

WORKSPACE_LIMIT = 1 << 36
"""Address space, not memory: only pages that steps touch are taken."""


class GgmlBackend:
    """One CPU, opened."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.lib = binding.load()
        self.team = Team(self.lib, settings.threads, settings.pinned)
        self.recorder = Recorder(self.lib, self.team)
        self.arena = SharedArena(WORKSPACE_LIMIT)
        kernel_mode = KernelMode.open(settings, self.recorder)
        self.mode: Mode = GgmlMode(self.recorder) if kernel_mode is None else kernel_mode
        self.costs = LinearCost()
        self.tally: dict[str, float] = {"captures": 0, "replays": 0}
        self.captured: list[Captured] = []
        self.held_weights = 0
        self.conversions = Conversions()
        self.locks = Locks(settings.mlock)
        self.mode.lock_with(self.locks.hold)
        self.tables = Tables()

    @property
    def ops(self) -> GgmlOps:
        return self.mode.ops

    # -- what it can do

    def capabilities(self) -> Capabilities:
        return self.mode.capabilities(self.settings, self.lib)

    def supports(self, signature: OpSignature) -> Support:
        return self.mode.supports(signature)

    def placement(self) -> tuple[Placement, ...]:
        return self.conversions.told(self.mode.placement())

    # -- memory

    def memory(self) -> tuple[MemoryTier, ...]:
        return (memory.host_tier(),)

    def plan(self, request: MemoryRequest) -> MemoryPlan:
        return memory.divide(request, memory.host_tier(), self.held_weights)

    # -- arrays

    def upload(self, host: NDArray[Any]) -> Node:
        return host_node(np.array(host, copy=True))

    def download(self, array: Node) -> NDArray[Any]:
        if array.memory is not None and array.memory.shape == array.shape:
            return array.memory.copy()
        with self.recorder.tape() as tape:
            whole = joined(tape, array)
        return view_f32(whole).copy()

    def upload_step(self, batch: StepBatch) -> StepMeta[Node]:
        capacity = Capacity(batch.num_tokens, len(batch.logit_rows), self._kv_capacity(batch))
        inputs = StepInputs(capacity)
        inputs.fill(batch)
        return self._meta(inputs, batch)

    def _kv_capacity(self, batch: StepBatch) -> int:
        return max(1, int(batch.seq_lens.sum())) if self.mode.gathers else 0

    def _meta(self, inputs: StepInputs, batch: StepBatch) -> StepMeta[Node]:
        return StepMeta(
            host=batch,
            token_ids=inputs.node("token_ids", "tokens"),
            positions=inputs.node("positions", "tokens"),
            slot_mapping=inputs.node("slots", "tokens"),
            query_start_loc=host_node(batch.query_start_loc),
            seq_lens=host_node(batch.seq_lens),
            block_tables=host_node(batch.block_tables),
            logit_rows=inputs.node("logit_rows", "rows"),
            sampling=inputs,
        )

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back."""

    def close(self) -> None:
        for captured in self.captured:
            captured.close()
        self.captured.clear()
        self.team.stop()

    # -- weights

    def pack(self, parts: Sequence[QuantTensor], role: WeightRole) -> PackedWeight[Node]:
        if role in weights.VECTOR_ROLES:
            vector = weights.vector(parts)
            return PackedWeight(
                payload=weights.Weight(vector=vector),
                shape=vector.shape,
                nbytes=vector.nbytes,
                format_id="F32",
                role=role,
            )
        stack = weights.stacked(parts, role)
        size = sum(p.data.nbytes for p in stack)
        self.mode.prepare(stack, role)
        for part in stack:
            self._account(part)
            if role is WeightRole.EMBEDDING and not self.mode.reads_file:
                self.tables.add(part)
        outputs = tuple(p.outputs for p in stack)
        payload = weights.Weight(parts=stack)
        self._hold(payload, size)
        return PackedWeight(
            payload=payload,
            shape=(*stack[0].shape[:-2], sum(outputs), stack[0].inputs),
            nbytes=size,
            format_id="+".join(sorted({p.format for p in stack})),
            role=role,
            parts=outputs if len(outputs) > 1 else (),
        )

    def _account(self, part: weights.Part) -> None:
        """Say what was re-blocked, do not hold it twice, as blocks and as tiles."""
        if part.source:
            cause = "rounded once" if part.source in FLOAT8 else "float16 scales"
            self.conversions.add(part.source, part.format, part.error, cause)
            if part.tiles is not None:
                part.data = part.data[:0].copy()

    def _hold(self, payload: weights.Weight, nbytes: int) -> None:
        self.held_weights += nbytes
        weakref.finalize(payload, self._let_go, nbytes)

    def _let_go(self, nbytes: int) -> None:
        self.held_weights -= nbytes

    def unpack(self, weight: PackedWeight[Node]) -> NDArray[Any]:
        payload = weight.payload
        if payload.vector is not None:
            return np.array(payload.vector)
        return np.concatenate([self._values(p) for p in payload.parts], axis=-2)

    def _values(self, part: weights.Part) -> NDArray[np.float32]:
        """Dequantised by ggml: every row of the matrix looked up."""
        if part.data.size == 0:
            matrices = [self._product_with_ones(p) for p in weights.matrices(part)]
            return np.stack(matrices).reshape(part.shape)
        rows, k = int(np.prod(part.shape[:-1])), part.inputs
        flat = attrs.evolve(part, shape=(rows, k))
        ids = host_node(np.arange(rows, dtype=np.int32))
        with self.recorder.tape() as tape:
            out = tape.op("get_rows", weight_tensor(tape, flat), ids, shape=(rows, k))
        values = view_f32(out).reshape(part.shape).copy()
        if part.perm is not None:
            values[..., part.perm] = values.copy()
        return values

    def _product_with_ones(self, part: weights.Part) -> NDArray[np.float32]:
        """What the tiles of a matrix hold (the blocks are gone), to float32's rounding."""
        identity = host_node(np.eye(part.inputs, dtype=np.float32))
        whole = PackedWeight(
            payload=weights.Weight(parts=(part,)),
            shape=part.shape,
            nbytes=0,
            format_id=part.format,
            role=WeightRole.LINEAR,
        )
        return np.ascontiguousarray(self.download(self.ops.linear(identity, whole)).T)

    # -- KV

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        return self.mode.kv_layout(spec)

    def kv_alloc(self, layout: KVLayout, num_blocks: int) -> KVCache:
        need, free = num_blocks * layout.bytes_per_block, memory.host_tier().free
        if need > free:
            raise OutOfDeviceMemory("dynamic", asked=need, free=free, fix="ask for fewer blocks")
        pool = self.mode.kv_pool(layout, num_blocks)
        self.locks.hold(pool.data.reshape(-1))
        return KVCache(layout=layout, num_blocks=num_blocks, payload=pool)

    def kv_copy(self, kv: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        check_block_ids([b for pair in pairs for b in pair], kv.num_blocks)
        kv.payload.copy(pairs)

    def kv_export(self, kv: KVCache, blocks: Sequence[int]) -> KVBlocks:
        check_block_ids(blocks, kv.num_blocks)
        return kv.payload.export(blocks)  # type: ignore[no-any-return]

    def kv_import(self, kv: KVCache, blocks: Sequence[int], data: KVBlocks) -> None:
        check_block_ids(blocks, kv.num_blocks)
        check_kv_blocks(kv.layout.spec, blocks, data)
        kv.payload.load(blocks, data.data)

    # -- steps

    def capture_key(self, batch: StepBatch) -> Hashable | None:
        if batch.num_tokens == 0:
            return None
        return self._capacity(batch)

    def _capacity(self, batch: StepBatch) -> Capacity:
        rows = len(batch.logit_rows)
        every = rows == batch.num_tokens
        # mostly decoding: one size for all counts of rows
        rows = bucket(batch.num_tokens if 2 * rows > batch.num_tokens else rows)
        return Capacity(bucket(batch.num_tokens), rows, bucket(self._kv_capacity(batch)), every)

    def capture(
        self, step: Callable[[StepMeta[Node]], Sampled[Node]], batch: StepBatch
    ) -> Replay[Node] | None:
        inputs = StepInputs(self._capacity(batch))
        inputs.fill(batch)
        captured = record(self, step, inputs, self._meta(inputs, batch))
        self.captured.append(captured)
        self.tally["captures"] += 1
        return captured

    # -- advice and telemetry

    def limits(self) -> Limits:
        return self.mode.limits()

    def cost(self, shape: StepShape) -> Cost | None:
        return self.costs.predict(shape)

    def observe(self, shape: StepShape, seconds: float) -> None:
        self.costs.observe(shape, seconds)

    def counters(self) -> Telemetry:
        return Telemetry(
            counters=dict(self.tally),
            gauges={
                "threads": self.team.threads,
                "workspace_bytes": self.arena.used,
                "locked_bytes": locked_bytes(),
            },
        )


def create(options: BackendOptions) -> GgmlBackend:
    """The factory that `BackendSpec` names."""
    return GgmlBackend(Settings.of(options))
