"""Experts in one stack or two against float64; refusals; sizes from cgroups."""

import numpy as np
import pytest
from ggml_cases import backend_for, packed, quant_weight, relative

from halogen_core.spi import (
    BackendOptions,
    ConfigError,
    KVSpec,
    MoESpec,
    OutOfDeviceMemory,
    QuantTensor,
    WeightRole,
)
from halogen_cpu_ggml.planning import Request, place
from halogen_cpu_ggml.settings import Settings
from halogen_cpu_ggml.threads import cgroup_cpus

H, F, E, T, K = 64, 32, 6, 5, 2


@pytest.mark.parametrize("stacks", [1, 2])
def test_experts(stacks):
    rng = np.random.default_rng(0)
    b = backend_for("auto")
    router, r = quant_weight(rng, "F32", E, H)
    down, d = quant_weight(rng, "F32", E, H, F)
    if stacks == 1:
        tensor, gate_up = quant_weight(rng, "F32", E, 2 * F, H)
        weight = packed(b, tensor, role=WeightRole.EXPERTS)
    else:
        (gate, g), (up, u) = (quant_weight(rng, "F32", E, F, H) for _ in range(2))
        weight = packed(b, gate, up, role=WeightRole.EXPERTS)
        gate_up = np.concatenate([g, u], axis=1)
    x = rng.standard_normal((T, H), dtype=np.float32)
    experts = packed(b, down, role=WeightRole.EXPERTS)
    spec = MoESpec(num_experts=E, top_k=K)
    got = b.download(b.ops.moe(b.upload(x), packed(b, router), weight, experts, spec))
    want = np.zeros((T, H))
    for t in range(T):
        chance = np.exp(r @ x[t] - (r @ x[t]).max())
        top = np.argsort(-chance)[:K]
        for e in top:
            both = gate_up[e] @ x[t]
            hidden = both[:F] / (1 + np.exp(-both[:F])) * both[F:]
            want[t] += chance[e] / chance[top].sum() * (d[e] @ hidden)
    assert relative(got, want) < 1e-5


def test_what_cannot_be_is_refused():
    b = backend_for("auto")
    data = np.zeros(7, np.uint8)
    for fmt in ("Q4_0", "NONSENSE"):
        with pytest.raises(ConfigError):
            b.pack([QuantTensor(format=fmt, shape=(2, 32), data=data)], WeightRole.LINEAR)
    with pytest.raises(ConfigError):
        b.kv_layout(KVSpec(num_layers=1, num_kv_heads=1, head_dim=64, block_size=24))
    layout = b.kv_layout(KVSpec(num_layers=1, num_kv_heads=1, head_dim=64))
    with pytest.raises(OutOfDeviceMemory):
        b.kv_alloc(layout, 1 << 40)
    kv = b.kv_alloc(layout, 2)
    with pytest.raises(ConfigError):
        b.kv_export(kv, [2])
    with pytest.raises(ConfigError):
        Settings.of(BackendOptions(extra={"kernel": "avx2"}))
    with pytest.raises(ConfigError, match="has only `cpu_ggml:0`"):
        Settings.of(BackendOptions(device="cpu_ggml:7"))


def test_threads_follow_the_cgroup(tmp_path):
    assert cgroup_cpus(str(tmp_path)) is None
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    quota = tmp_path / "sys/fs/cgroup/cpu.max"
    quota.write_text("150000 100000\n")
    assert cgroup_cpus(str(tmp_path)) == 1.5
    quota.write_text("max 100000\n")
    assert cgroup_cpus(str(tmp_path)) is None


def test_buffers_alive_together_never_overlap():
    rng = np.random.default_rng(1)
    births = np.sort(rng.integers(0, 60, 80))
    requests = [
        Request(int(rng.integers(1, 5000)), int(b), int(b + rng.integers(0, 9))) for b in births
    ]
    offsets, size = place(requests, 64)
    for i, (a, x) in enumerate(zip(requests, offsets, strict=True)):
        assert x + a.nbytes <= size
        for b, y in zip(requests[:i], offsets, strict=False):
            if a.born <= b.dies and b.born <= a.dies:
                assert x + a.nbytes <= y or y + b.nbytes <= x


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "f8_e5m2"])
def test_blocks_survive_export_and_import(backend, dtype):
    if dtype not in backend.capabilities().kv_dtypes:
        assert dtype == "f8_e5m2"
        return
    spec = KVSpec(num_layers=2, num_kv_heads=3, head_dim=64, dtype=dtype, block_size=32)
    kv = backend.kv_alloc(backend.kv_layout(spec), 5)
    empty = backend.kv_export(kv, [0, 1, 2])
    data = np.random.default_rng(2).integers(0, 256, empty.data.shape, dtype=np.uint8)
    backend.kv_import(kv, [4, 0, 2], type(empty)(spec=spec, data=data))
    backend.kv_copy(kv, [(4, 1)])
    np.testing.assert_array_equal(backend.kv_export(kv, [1, 0, 2]).data, data)
