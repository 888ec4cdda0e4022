"""Numeric checks of a backend on this machine: its ops against plain torch in float32.

Small on purpose (seconds), and aimed at what was seen to go wrong in the field: kernels of another
chip that give garbage, prompts longer than one step, one sequence reading another's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_core.errors import HalogenError
from halogen_core.models import Decoder, config_of, kv_spec
from halogen_core.spi import (
    Activation,
    Backend,
    BackendOptions,
    Capabilities,
    MoESpec,
    OpSignature,
    PackedWeight,
    SupportLevel,
    TorchBackend,
    WeightRole,
)
from halogen_core.spi.testing import Share, f32_tensor, quantised, step_batch, tiny_checkpoint

Values = NDArray[Any]
Probe = Callable[[Backend[Any]], Values]

ALLOWED = {"f32": 2e-4, "f16": 1e-2, "bf16": 4e-2}
"""Largest error over the largest value, by compute dtype."""
ROUNDED = 4e-2
"""For 8-bit activations."""
WHOLE = {"f32": 1e-2, "f16": 3e-2, "bf16": 0.15}
"""For a whole model: rounding adds up over layers, and the KV cache is 16 bits wide."""
FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
K, N = 512, 96


@attrs.frozen(kw_only=True)
class Outcome:
    """One line of the table."""

    name: str
    verdict: str
    """`ok`, `wrong`, `refused` (as `supports` says) or `error`."""
    error: float | None = None
    allowed: float = 0.0
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.verdict in ("ok", "refused")


def run_checks(backend: Backend[Any]) -> Iterator[Outcome]:
    """Every check, as it is done."""
    own = backend.capabilities()
    reference = TorchBackend(BackendOptions(extra={"dtype": "f32"}), name="reference")
    for name, signature, probe in _probes(own):
        support = None if signature is None else backend.supports(signature)
        if support is not None and support.level is SupportLevel.NO:
            yield Outcome(name=name, verdict="refused", note="; ".join(support.reasons))
        else:
            yield _judge(name, probe, backend, reference, own)


def _judge(
    name: str, probe: Probe, backend: Backend[Any], exact: Backend[Any], own: Capabilities
) -> Outcome:
    allowed = ALLOWED[own.compute_dtypes[0]]
    if ":" in name:
        allowed = WHOLE[own.compute_dtypes[0]]
    if own.quantized_activations and name.startswith("linear"):
        allowed = max(allowed, ROUNDED)
    try:
        got, want = probe(backend), probe(exact)
    except HalogenError as exc:
        return Outcome(name=name, verdict="error", note=str(exc))
    except Exception as exc:
        # a kernel that does not compile or run raises anything
        return Outcome(name=name, verdict="error", note=f"{type(exc).__name__}: {exc}")
    error = float(np.abs(got - want).max() / max(1e-6, float(np.abs(want).max())))
    verdict = "ok" if error <= allowed else "wrong"  # a NaN is not ok
    return Outcome(name=name, verdict=verdict, error=error, allowed=allowed)


def _probes(own: Capabilities) -> Iterator[tuple[str, OpSignature | None, Probe]]:
    for form in FORMATS:
        if own.weight_formats.get(form) == "native":
            for rows in (1, 5, 33):
                signature = OpSignature(op="linear", weight_format=form)
                yield f"linear {form}, {rows} rows", signature, _linear(form, rows)
    yield "embed", OpSignature(op="embed"), _embed
    yield "rms_norm", OpSignature(op="rms_norm"), _rms_norm
    yield "add_rms_norm", OpSignature(op="add_rms_norm"), _add_rms_norm
    for kind in (Activation.SILU, Activation.GELU_TANH):
        yield f"gated_act {kind.value}", OpSignature(op="gated_act"), _gated(kind)
    yield "mlp", OpSignature(op="mlp"), _mlp
    spec = MoESpec(num_experts=6, top_k=2)
    yield "moe", OpSignature(op="moe", moe=spec), _moe(spec)
    yield "logits", OpSignature(op="logits"), _logits
    # in bf16 two experts may tie where in float32 they do not, and then all that follows differs
    routed = () if own.compute_dtypes[0] == "bf16" else ("llama-moe",)
    for name in ("llama", "qwen3", "gemma3", *routed):
        yield f"{name}: prompt in one step", None, _model(name, (40,))
        yield f"{name}: prompt over three steps", None, _model(name, (17, 22, 1))
        yield f"{name}: beside another stream", None, _model(name, (17, 23), beside=True)


def _array(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _matrix(backend: Backend[Any], form: str, seed: int, *shape: int) -> PackedWeight[Any]:
    values = _array(seed, *shape) * np.float32(shape[-1] ** -0.5)
    role = WeightRole.EXPERTS if len(shape) == 3 else WeightRole.LINEAR
    return backend.pack([quantised(f32_tensor(f"selftest.{seed}", values), form)], role)


def _vector(backend: Backend[Any], size: int) -> PackedWeight[Any]:
    values = 1 + 0.2 * _array(9, size)
    return backend.pack([f32_tensor("selftest.norm", values)], WeightRole.NORM)


def _linear(form: str, rows: int) -> Probe:
    def run(backend: Backend[Any]) -> Values:
        weight = _matrix(backend, form, 1, N, K)
        return backend.download(backend.ops.linear(backend.upload(_array(2, rows, K)), weight))

    return run


def _embed(backend: Backend[Any]) -> Values:
    table = backend.pack([f32_tensor("selftest.table", _array(3, 50, 64))], WeightRole.EMBEDDING)
    rows = backend.upload(np.array([0, 49, 7, 7], np.int32))
    return backend.download(backend.ops.embed(rows, table, scale=1.5))


def _rms_norm(backend: Backend[Any]) -> Values:
    x = backend.upload(_array(4, 7, K))
    return backend.download(backend.ops.rms_norm(x, _vector(backend, K), eps=1e-5))


def _add_rms_norm(backend: Backend[Any]) -> Values:
    x, residual = backend.upload(_array(4, 7, K)), backend.upload(_array(5, 7, K))
    pair = backend.ops.add_rms_norm(x, residual, _vector(backend, K), eps=1e-5)
    return np.concatenate([backend.download(part) for part in pair])


def _gated(kind: Activation) -> Probe:
    return lambda backend: backend.download(
        backend.ops.gated_act(backend.upload(_array(6, 5, 2 * N)), kind)
    )


def _mlp(backend: Backend[Any]) -> Values:
    gate_up, down = _matrix(backend, "F32", 7, 2 * N, K), _matrix(backend, "F32", 8, K, N)
    x = backend.upload(_array(4, 1, K))
    return backend.download(backend.ops.mlp(x, gate_up, down, Activation.SILU))


def _moe(spec: MoESpec) -> Probe:
    def run(backend: Backend[Any]) -> Values:
        router = backend.pack([f32_tensor("selftest.router", _array(10, 6, 64))], WeightRole.LINEAR)
        gate_up = _matrix(backend, "F32", 11, 6, 2 * N, 64)
        down = _matrix(backend, "F32", 12, 6, 64, N)
        x = backend.upload(_array(13, 9, 64))
        return backend.download(backend.ops.moe(x, router, gate_up, down, spec))

    return run


def _logits(backend: Backend[Any]) -> Values:
    x, weight = backend.upload(_array(4, 3, K)), _matrix(backend, "F32", 14, 200, K)
    return backend.download(backend.ops.logits(x, weight, scale=0.5, softcap=3.0))


def _model(name: str, counts: tuple[int, ...], *, beside: bool = False) -> Probe:
    """The last logits of a prompt computed in steps of `counts`, alone or beside another."""

    def run(backend: Backend[Any]) -> Values:
        checkpoint = tiny_checkpoint(name, head_dim=32, seed=3)
        config = config_of(checkpoint)
        own = backend.capabilities()
        layout = backend.kv_layout(
            kv_spec(config, dtype=own.kv_dtypes[0], block_size=own.kv_block_sizes[0])
        )
        decoder = Decoder.load(config, checkpoint, backend)
        size = layout.spec.block_size
        blocks = -(-sum(counts) // size)
        kv = backend.kv_alloc(layout, 2 * blocks + 1)
        rng = np.random.default_rng(5)
        tokens = rng.integers(0, config.vocab_size, (2, sum(counts))).tolist()
        start, last = 0, None
        for count in counts:
            span = slice(start, start + count)
            shares = [_share(tokens[i][span], start, i * blocks, blocks) for i in range(1 + beside)]
            meta = backend.upload_step(step_batch(shares, size))
            last = backend.download(decoder.logits(backend.ops, meta, kv))
            start += count
        assert last is not None
        return last[:1]

    return run


def _share(tokens: list[int], start: int, first: int, count: int) -> Share:
    return Share(tokens=tuple(tokens), blocks=tuple(range(first, first + count)), start=start)
