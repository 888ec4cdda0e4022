"""Runs in a process with torch_npu and stubs: the real path, shape-only, every call written down.

Prints one JSON object: `calls` with op name, tensor arguments and results, and `refused`.
"""

import json
import sys

import attrs
import numpy as np
import torch
import torch_npu  # noqa: F401
from ascend_steps import Config, Decoder, f32, step
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from halogen_ascend.npu import calls
from halogen_ascend.npu.backend import NpuBackend
from halogen_ascend.npu.graph import TaskList
from halogen_ascend.npu.ops import NpuOps
from halogen_ascend.weights.quantize import quantize_rows
from halogen_core.spi import (
    Activation,
    AttentionSpec,
    BackendOptions,
    HalogenError,
    KVSpec,
    MoESpec,
    RopeSpec,
    RopeStyle,
    TorchBackend,
    WeightRole,
)

# no Meta kernels in the wheel: the cast keeps shape and dtype, the workspace is of any size
torch.library.register_fake(
    "npu::_npu_fused_infer_attention_score_get_max_workspace",
    lambda q, k, v, **named: q.new_empty(1, dtype=torch.uint8),
)
for name in ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"):
    torch.library.register_fake(
        f"npu::{name}.out", lambda q, k, v, *, workspace, out, **named: tuple(out)
    )
torch.library.register_fake(
    "npu::npu_format_cast", lambda x, fmt, customize_dtype=None, input_dtype=None: x.clone()
)


class Recorder(TorchDispatchMode):
    """Writes down every `npu::` call that passes the dispatcher."""

    def __init__(self):
        super().__init__()
        self.calls, self.nz, self.nz_touched = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and any(a is w for a in args for w in self.nz):
            self.nz_touched.append(str(func))
        if func.namespace in ("npu", "atb"):
            self.calls.append(
                {
                    "op": f"{func.namespace}::{func._schema.name.split('::')[1]}",
                    "overload": func._overloadname,
                    "tensors": _tensors([*args, *(kwargs or {}).items()]),
                    "named": {k: v for k, v in (kwargs or {}).items() if _plain(v)},
                    "out": _tensors(out if isinstance(out, (tuple, list)) else [out]),
                }
            )
        if "format_cast" in str(func):
            self.nz.append(out)
        return out


def _plain(value):
    if isinstance(value, list):
        return all(isinstance(v, int) for v in value)
    return isinstance(value, (int, float, str, bool))


def _tensors(values):
    found = []
    for given in values:
        name, value = given if isinstance(given, tuple) and len(given) == 2 else ("", given)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, torch.Tensor):
                assert isinstance(item, FakeTensor), f"{name} is a real tensor"
                dtype = str(item.dtype).removeprefix("torch.")
                found.append([name, item.device.type, dtype, list(item.shape)])
    return found


def on_device(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="npu:0")


class LaneOps(NpuOps):
    def constant(self, values, device):
        return torch.empty(len(values), device=device)


class LaneBackend(NpuBackend):
    """Uploads by shape only: a fake tensor that remembers its values is copied for real."""

    ops_class = LaneOps

    def upload(self, host):
        return on_device(torch.from_numpy(host))

    def upload_step(self, batch):
        meta = TorchBackend(BackendOptions(), device="cpu").upload_step(batch)
        fields = attrs.asdict(meta, recurse=False)
        moved = {k: on_device(v) for k, v in fields.items() if isinstance(v, torch.Tensor)}
        return attrs.evolve(meta, **moved)


def model(backend):
    """A decoder with windows, W8A8 and W8A16 matrices, prefill and mixed steps."""
    kinds = iter(["W8A8", "W8A8", "W8A16", "W8A8"] * 4)

    def quantize(parts):
        kind = next(kinds)
        with unset_fake_temporarily():
            return [quantize_rows(f32(p), kind) for p in parts]

    decoder = Decoder(backend, Config(dim=128, alternate_window=40), quantize=quantize)
    for items in ([([1] * 150, 0, [0, 1])], [([1], 150, [0, 1]), ([2] * 9, 0, [2])]):
        logits = decoder.forward(backend.upload_step(step(items)))
        assert list(logits.shape) == [len(items), 97], logits.shape
        assert logits.dtype is torch.float32
        assert logits.device.type == "npu"
    plain = Decoder(backend, Config(dim=128))
    plain.forward(backend.upload_step(step([([3] * 5, 0, [4])])))


def attention_kinds(backend):
    """Sinks take the second operator; D = 80, softcap and interleaved RoPE their own ways."""
    qkv = backend.upload(np.zeros((5, 6 * 128), np.float32))
    base = AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=128, scale=0.1)
    sinks = backend.pack([f32(np.zeros(4))], WeightRole.SINKS)
    norm = backend.pack([f32(np.ones(128))], WeightRole.NORM)
    rope = RopeSpec(dim=64, inv_freq=(1.0,) * 32, style=RopeStyle.INTERLEAVED)
    ops = backend.ops
    for spec, extra in (
        (base, sinks),
        (attrs.evolve(base, softcap=30.0), None),
        (attrs.evolve(base, rope=rope), None),
        (attrs.evolve(base, num_heads=6, num_kv_heads=3, head_dim=64), None),
    ):
        heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        kv_spec = KVSpec(
            num_layers=1,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=128,
        )
        kv = backend.kv_alloc(backend.kv_layout(kv_spec), 4)
        meta = backend.upload_step(step([([1] * 5, 0, [0])]))
        norms = {"q_norm": norm, "k_norm": norm} if spec.head_dim == 128 else {}
        q = ops.qkv_rope_store(qkv.narrow(1, 0, heads), kv, 0, meta, spec, **norms)
        out = ops.attention(q, kv, 0, meta, spec, sinks=extra)
        assert list(out.shape) == [5, spec.num_heads * spec.head_dim]
    assert ops.composed == 1, ops.composed


def experts(backend):
    spec = MoESpec(num_experts=8, top_k=2)
    packed = [
        backend.pack([f32(np.zeros(s))], role)
        for s, role in (
            ((8, 64), WeightRole.LINEAR),
            ((8, 192, 64), WeightRole.EXPERTS),
            ((8, 64, 96), WeightRole.EXPERTS),
        )
    ]
    out = backend.ops.moe(backend.upload(np.zeros((7, 64), np.float32)), *packed, spec)
    assert list(out.shape) == [7, 64]
    assert backend.ops.gated_act(out.repeat(1, 2), Activation.SILU).shape == (7, 64)


def refusals(backend):
    """What the Meta kernels let through and we do not."""
    said = []
    fake = backend.upload(np.zeros((4, 64), np.float32)).half()
    attempts = {
        "block size 100": lambda: backend.kv_layout(
            KVSpec(num_layers=1, num_kv_heads=1, head_dim=128, block_size=100)
        ),
        "float32 to NZ": lambda: calls.to_nz(fake.float()),
        "int8 too wide": lambda: calls.quantised_linear(fake, fake, fake.new_zeros(70000), None),
        "host tensor in a device op": lambda: calls.rms_norm(
            fake, torch.zeros(64, dtype=torch.half), 1e-6
        ),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except (HalogenError, RuntimeError) as exc:
            said.append([name, type(exc).__name__, str(exc)[:200]])
    return said


class Runtime:
    """The order of graph calls, written down; no device runs them."""

    def __init__(self):
        self.log = []

    def __getattr__(self, name):
        def call(*args):
            self.log.append(name)
            return self

        return call

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None


def captured(backend):
    """Attention under capture: its own output operator, workspace, task group, update."""
    decoder, runtime = Decoder(backend, Config(dim=128, layers=1)), Runtime()
    batch = step([([1], 10, [0]), ([1], 20, [1])])
    ops = backend.ops
    ops.tasks = TaskList(runtime)
    decoder.forward(backend.upload_step(batch))
    tasks, ops.tasks = ops.tasks, None
    tasks.update(step([([1], 11, [0]), ([1], 21, [1])]), "second stream")
    return runtime.log


def main():
    with FakeTensorMode(allow_non_fake_inputs=True), Recorder() as recorder:
        backend = LaneBackend(BackendOptions(), device="npu:0", dtype=torch.float16, name="ascend")
        model(backend)
        attention_kinds(backend)
        experts(backend)
        graph = captured(backend)
        refused = refusals(backend)
    told = {"calls": recorder.calls, "refused": refused, "graph": graph}
    json.dump({**told, "nz_touched": recorder.nz_touched}, sys.stdout)


main()
