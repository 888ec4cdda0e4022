"""Backends and weights for these tests."""

import emulation
import gguf
import numpy as np

from halogen_core.spi import (
    FORMATS,
    BackendOptions,
    MoESpec,
    QuantTensor,
    SamplingBatch,
    StepBatch,
    WeightRole,
)
from halogen_cpu_ggml import native
from halogen_cpu_ggml.backend import create
from halogen_cpu_ggml.settings import kernel_choices

ISAS = [*native.runnable(), *emulation.modes()]
MODES = [*ISAS, "off"]
opened = {}


def backend_for(mode, threads=2):
    key = (mode, threads)
    if key not in opened:
        if mode in kernel_choices():
            opened[key] = create(BackendOptions(threads=threads, extra={"kernels": mode}))
        else:
            opened[key] = emulation.backend(mode, threads)
    return opened[key]


def quant_weight(rng, fmt, *shape):
    """A weight in `fmt` from random blocks, and its float64 values by an independent reader."""
    n = int(np.prod(shape))
    if fmt in ("F32", "F16", "BF16"):
        values = rng.standard_normal(shape).astype(np.float32)
        if fmt == "F32":
            raw = values.view(np.uint8)
        elif fmt == "F16":
            raw = values.astype(np.float16).view(np.uint8)
        else:
            raw = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        raw = raw.reshape(-1)
    else:
        block, size = FORMATS[fmt].block, FORMATS[fmt].bytes
        raw = rng.integers(0, 256, (n // block, size), dtype=np.uint8)
        for at in {
            "Q6_K": (208,),
            "Q4_K": (0, 2),
            "Q5_K": (0, 2),
            "Q4_1": (0, 2),
            "Q5_1": (0, 2),
        }.get(fmt, (0,)):
            scale = rng.uniform(0.001, 0.01, len(raw)).astype(np.float16) * rng.choice(
                [-1, 1], len(raw)
            ).astype(np.float16)
            raw[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
        raw = raw.reshape(-1)
    kind = gguf.GGMLQuantizationType[fmt]
    width = FORMATS[fmt].nbytes(shape[-1])
    rows = raw.reshape(-1, width)
    if fmt == "F32":
        values = rows.view(np.float32)
    elif fmt == "F16":
        values = rows.view(np.float16)
    else:
        values = gguf.quants.dequantize(rows, kind)
    tensor = QuantTensor(format=fmt, shape=tuple(shape), data=raw, name=fmt)
    return tensor, values.astype(np.float64).reshape(shape)


def packed(backend, *tensors, role=WeightRole.LINEAR):
    return backend.pack(list(tensors), role)


def vector(backend, values, role=WeightRole.NORM):
    values = np.asarray(values, np.float32)
    data = values.view(np.uint8)
    return backend.pack([QuantTensor(format="F32", shape=values.shape, data=data)], role)


def relative(got, want):
    """Root mean square error relative to the values' own."""
    want = np.asarray(want, np.float64)
    return float(np.sqrt(((got - want) ** 2).mean() / ((want**2).mean() + 1e-30)))


def greedy(rows):
    """Sampling that takes the likeliest token of each row."""

    def full(dtype, value=0):
        return np.full(rows, value, dtype)

    none = np.zeros(0, np.int32)
    start = np.zeros(rows + 1, np.int32)
    return SamplingBatch(
        temperature=full(np.float32),
        top_k=full(np.int32),
        top_p=full(np.float32, 1),
        min_p=full(np.float32),
        repetition_penalty=full(np.float32, 1),
        presence_penalty=full(np.float32),
        frequency_penalty=full(np.float32),
        uniforms=full(np.float32),
        forced=full(np.int32, -1),
        history_start=start,
        history_ids=none,
        history_counts=none,
        bias_start=start,
        bias_ids=none,
        bias_values=none.astype(np.float32),
    )


def step_batch(sequences, tables, block_size, token_ids=None, logit_rows=None, sampling=None):
    """A step of `sequences`: (new tokens, length after) each, with their block tables."""
    counts = [n for n, _ in sequences]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = np.concatenate([np.arange(length - n, length) for n, length in sequences])
    owner = np.repeat(np.arange(len(sequences)), counts)
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size
    rows = starts[1:] - 1 if logit_rows is None else np.asarray(logit_rows)
    total = int(starts[-1])
    return StepBatch(
        token_ids=np.zeros(total, np.int32) if token_ids is None else token_ids.astype(np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=slots + positions % block_size,
        query_start_loc=starts,
        seq_lens=np.array([length for _, length in sequences], np.int32),
        block_tables=tables,
        logit_rows=rows.astype(np.int32),
        sampling=sampling or greedy(len(rows)),
    )


def shuffled_tables(rng, sequences, block_size):
    """Block tables over a shuffled pool, and the number of blocks."""
    need = [-(-length // block_size) for _, length in sequences]
    blocks = rng.permutation(sum(need) + 3).astype(np.int32)
    tables = np.full((len(sequences), max(need)), -1, np.int32)
    at = 0
    for i, n in enumerate(need):
        tables[i, :n] = blocks[at : at + n]
        at += n
    return tables, len(blocks)


def experts_beside_float64(backend, rng, gate_up, g, down, d):
    """Two of four experts for 5 rows of 64, by the backend and in float64; g [4, 128, 64] and
    d [4, 64, 64] are what the tensors stand for."""
    router = rng.standard_normal((4, 64)).astype(np.float32)
    x = rng.standard_normal((5, 64)).astype(np.float32)
    packed = QuantTensor(format="F32", shape=(4, 64), data=router.reshape(-1).view(np.uint8))
    weights = (
        backend.pack([packed], WeightRole.LINEAR),
        backend.pack([gate_up], WeightRole.EXPERTS),
        backend.pack([down], WeightRole.EXPERTS),
    )
    got = backend.download(
        backend.ops.moe(backend.upload(x), *weights, MoESpec(num_experts=4, top_k=2))
    )
    want = np.zeros((5, 64))
    for t in range(5):
        chance = np.exp(router @ x[t])
        top = np.argsort(-chance)[:2]
        for e in top:
            gate, up = np.split(g[e] @ x[t], 2)
            want[t] += chance[e] / chance[top].sum() * (d[e] @ (gate / (1 + np.exp(-gate)) * up))
    return got, want
