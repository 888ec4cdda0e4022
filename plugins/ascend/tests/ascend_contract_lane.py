"""Runs in a process with torch_npu and stubs: the real path, shape-only, every call written down.

Prints one JSON object: `calls` with op name, tensor arguments and results, and `refused`.
"""

import inspect
import json
import sys

import attrs
import numpy as np
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from ascend_contract_recorder import Counted, Recorder, Runtime
from ascend_steps import Config, Decoder, f32, step
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

from halogen_ascend.npu import backend as npu_backend
from halogen_ascend.npu import calls
from halogen_ascend.npu.backend import NpuBackend
from halogen_ascend.npu.collectives import RankGroup, row_parallel_linear, share_of
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
for name in ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"):
    torch.library.register_fake(
        f"npu::_{name}_get_max_workspace",
        lambda q, k, v, **named: q.new_empty(1, dtype=torch.uint8),
    )
    torch.library.register_fake(
        f"npu::{name}.out", lambda q, k, v, *, workspace, out, **named: tuple(out)
    )
torch.library.register_fake(
    "npu::npu_format_cast", lambda x, fmt, customize_dtype=None, input_dtype=None: x.clone()
)


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


def captured(backend):
    """A step captured and replayed: output operators, workspaces, task groups, updates."""
    decoder = Decoder(backend, Config(dim=128, layers=1))
    runtime = Runtime(torch.npu)
    npu_backend._runtime = lambda: runtime
    replay = backend.capture(decoder.run, step([([1], 10, [0]), ([1], 20, [1])]))
    made = replay(step([([1], 11, [0]), ([1], 21, [1])]))
    assert list(made.token_ids.shape) == [2]
    return runtime.log


def captured_with_sinks(backend):
    """The second operator has an output form and a workspace of its own."""
    kv = KVSpec(num_layers=1, num_kv_heads=1, head_dim=128, block_size=128)
    cache = backend.kv_alloc(backend.kv_layout(kv), 2)
    spec = AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=128, scale=0.1)
    sinks = backend.pack([f32(np.zeros(4))], WeightRole.SINKS)
    q = backend.upload(np.zeros((1, 4 * 128), np.float32))
    ops, batch = backend.ops, step([([1], 10, [0])])
    ops.tasks = npu_backend.graph.TaskList(Runtime(torch.npu))
    ops.attention(q, cache, 0, backend.upload_step(batch), spec, sinks=sinks)
    ops.tasks = None


def opening():
    """What only a device can answer: the calls fit their signatures at least."""
    made = {"set_device": (0,), "mem_get_info": (torch.device("npu:0"),)}
    for name, args in made.items():
        inspect.signature(getattr(torch.npu, name)).bind(*args)
    return sorted(made)


def ranks(backend):
    """A row-parallel product: the vendor's group is registered for the device, and sums on it."""
    assert dist.Backend.default_device_backend_map["npu"] == "hccl"
    dist.init_process_group("npu:fake", rank=1, world_size=2, store=FakeStore())
    share = share_of(96, 1, 2)
    weight = backend.pack([f32(np.zeros((64, 96))[:, share])], WeightRole.LINEAR)
    x = backend.upload(np.zeros((5, 48), np.float32))
    out = row_parallel_linear(backend.ops, x, weight, RankGroup(1, 2), name="mlp")
    assert list(out.shape) == [5, 64]
    dist.destroy_process_group()


def main():
    counted = Counted(calls)
    with FakeTensorMode(allow_non_fake_inputs=True), Recorder() as recorder:
        backend = LaneBackend(BackendOptions(), device="npu:0", dtype=torch.float16, name="ascend")
        model(backend)
        attention_kinds(backend)
        experts(backend)
        graph = captured(backend)
        captured_with_sinks(backend)
        ranks(backend)
        refused = refusals(backend)
        assert list(int8(backend).payload.matrix().shape) == [32, 48]
    told = {
        "calls": recorder.calls,
        "schemas": recorder.schemas,
        "functions": counted.counts,
        "signatures": opening(),
        "nz_touched": recorder.nz_touched,
        "refused": refused,
        "graph": graph,
    }
    json.dump(told, sys.stdout)


def int8(backend):
    with unset_fake_temporarily():
        quantized = [quantize_rows(f32(np.ones((32, 48))), "W8A8")]
    return backend.pack(quantized, WeightRole.LINEAR)


main()
