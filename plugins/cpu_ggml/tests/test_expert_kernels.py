"""Experts by our kernels: against float64 in every format, ties, and bits that company cannot move."""

import numpy as np
import pytest
from ggml_cases import ISAS, backend_for, packed, quant_weight, relative

from halogen_core.spi import Activation, MoESpec, UnsupportedOp, WeightRole

FORMATS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
H, F = 256, 256


def oracle(x, router, gate_up, down, spec):
    """Float64; equal scores go to the lower expert."""
    out = np.zeros_like(x, np.float64)
    for t, row in enumerate(x.astype(np.float64)):
        logits = router @ row
        chance = np.exp(logits - logits.max())
        chance /= chance.sum()
        if spec.gating == "sigmoid":
            chance = 1 / (1 + np.exp(-logits))
        top = np.argsort(-chance, kind="stable")[: spec.top_k]
        share = chance[top] / (chance[top].sum() if spec.normalize_top_k else 1)
        for e, weight in zip(top, share * spec.weight_scale, strict=True):
            gate, up = np.split(gate_up[e] @ row, 2)
            out[t] += weight * (down[e] @ (gate / (1 + np.exp(-gate.clip(-700))) * up))
    return out


def layer(backend, rng, spec, fmt="F32", hidden=H, inner=F):
    e = spec.num_experts
    router, r = quant_weight(rng, "F32", e, hidden)
    gate_up, g = quant_weight(rng, fmt, e, 2 * inner, hidden)
    down, d = quant_weight(rng, fmt, e, hidden, inner)
    weights = (
        packed(backend, router),
        packed(backend, gate_up, role=WeightRole.EXPERTS),
        packed(backend, down, role=WeightRole.EXPERTS),
    )
    return weights, (r, g, d)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format(kernel_backend, fmt):
    rng, spec = np.random.default_rng(1), MoESpec(num_experts=5, top_k=2)
    weights, values = layer(kernel_backend, rng, spec, fmt)
    x = rng.standard_normal((7, H), dtype=np.float32)
    got = kernel_backend.download(kernel_backend.ops.moe(kernel_backend.upload(x), *weights, spec))
    limit = 1e-5 if fmt in ("F32", "F16", "BF16") else 0.03
    assert relative(got, oracle(x, *values, spec)) < limit


@pytest.mark.parametrize(
    "spec",
    [
        MoESpec(num_experts=1, top_k=1),
        MoESpec(num_experts=128, top_k=8),
        MoESpec(num_experts=6, top_k=6, normalize_top_k=False),
        MoESpec(num_experts=9, top_k=3, gating="sigmoid", weight_scale=2.5),
    ],
    ids=["one", "many", "all", "sigmoid"],
)
@pytest.mark.parametrize("tokens", [1, 40])
def test_choices(kernel_backend, spec, tokens):
    rng = np.random.default_rng(2)
    weights, values = layer(kernel_backend, rng, spec, hidden=32, inner=20)
    x = rng.standard_normal((tokens, 32), dtype=np.float32)
    got = kernel_backend.download(kernel_backend.ops.moe(kernel_backend.upload(x), *weights, spec))
    assert relative(got, oracle(x, *values, spec)) < 1e-5


@pytest.mark.parametrize("fmt", ["F32", "Q4_K"])
@pytest.mark.parametrize("isa", ISAS)
def test_a_row_has_the_same_bits_in_any_company(isa, fmt):
    """Alone, in company, chunked, on one thread or on two."""
    spec = MoESpec(num_experts=6, top_k=2)
    x = np.random.default_rng(4).standard_normal((29, H), dtype=np.float32)
    results = []
    for threads in (1, 2):
        backend = backend_for(isa, threads)
        weights, _ = layer(backend, np.random.default_rng(3), spec, fmt)

        def run(rows, backend=backend, weights=weights):
            return backend.download(backend.ops.moe(backend.upload(rows), *weights, spec))

        results.append(run(x))
        results.append(np.concatenate([run(x[i : i + 1]) for i in range(29)]))
        results.append(np.concatenate([run(x[:13]), run(x[13:])]))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_what_does_not_fit_is_refused(backend):
    rng, spec = np.random.default_rng(5), MoESpec(num_experts=4, top_k=2)
    weights, _ = layer(backend, rng, spec, hidden=32, inner=32)
    x = backend.upload(np.zeros((2, 32), np.float32))
    other, _ = layer(backend, rng, spec, hidden=32, inner=64)
    for bad, given in (
        (MoESpec(num_experts=4, top_k=5), weights),
        (MoESpec(num_experts=3, top_k=1), weights),
        (spec, (weights[0], weights[1], other[2])),
    ):
        with pytest.raises(UnsupportedOp):
            backend.ops.moe(x, *given, bad)


@pytest.mark.parametrize("kind", list(Activation))
def test_activations(kernel_backend, kind):
    """Each curve equals the plain MLP of the single expert."""
    rng = np.random.default_rng(6)
    spec = MoESpec(num_experts=1, top_k=1, activation=kind)
    weights, (_, g, d) = layer(kernel_backend, rng, spec, hidden=64, inner=48)
    x = rng.standard_normal((3, 64), dtype=np.float32)
    ops, given = kernel_backend.ops, kernel_backend.upload(x)
    got = kernel_backend.download(ops.moe(given, *weights, spec))
    plain = [kernel_backend.pack([_f32(v)], WeightRole.LINEAR) for v in (g[0], d[0])]
    want = kernel_backend.download(ops.mlp(given, *plain, kind))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def _f32(values):
    from halogen_core.spi import QuantTensor

    data = values.astype(np.float32).reshape(-1).view(np.uint8)
    return QuantTensor(format="F32", shape=values.shape, data=data)
