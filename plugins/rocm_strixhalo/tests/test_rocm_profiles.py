"""The shipped profiles beside the backend that they stand for, opened on a machine's tree."""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import attrs
import numpy as np
import pytest

from halogen_core.cli.plan import Workload, plan
from halogen_core.cli.profiles import find_profile, profile_of
from halogen_core.engine.fitting import memory_request
from halogen_core.engine.options import EngineOptions
from halogen_core.errors import OutOfMemory
from halogen_core.models import Decoder, config_of, kv_spec
from halogen_core.spi import BackendOptions, WeightRole
from halogen_rocm.backend import RocmBackend
from halogen_triton.backend import GRAPH_BYTES
from halogen_triton.packing import PACKED_FORMATS

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "triton_kernels/tests"))
from quantised_weights import random_weight
from tiny_models import quant_tensor, tiny
from trees import tree

PROFILE = find_profile("strix-halo-128")


@pytest.mark.parametrize("name", ["strix-halo-128", "strix-halo-64"])
@pytest.mark.parametrize("ratio", [0.85, 2e-5])
def test_a_plan_is_what_an_engine_gets(tmp_path, name, ratio):
    """The same model opened on a machine that is as the profile says."""
    profile = find_profile(name)
    root = tree(
        tmp_path, "A", mem_kb=(profile.free >> 10) + (9 << 20), available_kb=profile.free >> 10
    )
    backend = RocmBackend(BackendOptions(extra={"mlock": "off"}), root=root, device="cpu")
    model = tiny("llama", form="Q4_K", hidden=256, head_dim=64, inner=512)
    del model.tensors["output.weight"]
    config = config_of(model)
    work = Workload(context=config.context_length, kv_dtype="bf16", block_size=16, kv_ratio=ratio)
    about = plan(model, config, profile, work)
    loaded = Decoder.load(config, model, backend)
    assert about["pools"]["static"] == loaded.nbytes == backend.counters().gauges["static_bytes"]

    layout = backend.kv_layout(kv_spec(config, dtype="bf16", block_size=16))

    def divide(**more):
        options = EngineOptions(model_path="", model_id="", end_token_ids=[], **more)
        request = memory_request(options, config, layout, config.context_length, loaded.nbytes)
        # no graphs off the GPU
        request = attrs.evolve(request, graph_bytes=GRAPH_BYTES)
        return backend.plan(request)

    own = divide(kv_ratio=ratio).num_blocks
    told = next(line for line in about["arithmetic"] if "halogen serve" in line)
    assert f"{own * 16 // config.context_length} sessions of" in told
    size = int(told.split("--pool-size ")[1].split("MiB")[0]) << 20
    blocks = divide(kv_bytes=size).num_blocks
    assert 0 <= about["kv_tokens"] // 16 - blocks <= (1 << 20) // layout.bytes_per_block + 1
    assert divide(kv_bytes=about["pools"]["dynamic"]).num_blocks * 16 == about["kv_tokens"]
    with pytest.raises(OutOfMemory, match="are left"):
        divide(kv_bytes=about["pools"]["dynamic"] + 4096)


@pytest.mark.parametrize("form", ["F32", "F16", "BF16", *PACKED_FORMATS])
def test_a_profile_knows_what_packing_makes_of_a_format(tmp_path, form):
    backend = RocmBackend(
        BackendOptions(extra={"mlock": "off"}), root=tree(tmp_path, "A"), device="cpu"
    )
    if form in PACKED_FORMATS:
        tensor, _ = random_weight(form, 64, 1024)
    else:
        tensor = quant_tensor("w", np.zeros((64, 1024)), form)
    packed = backend.pack([tensor], WeightRole.LINEAR).nbytes
    assert PROFILE.packed_bytes(tensor) == packed


def test_bench_knows_the_profile_of_a_device():
    assert profile_of("rocm_strixhalo", "rocm:0 (gfx1151, card1)").bandwidth == PROFILE.bandwidth
    assert profile_of("rocm_strixhalo", "rocm:0 (gfx1100, card1)") is None
    assert profile_of("cuda", "cuda:0 (NVIDIA GeForce RTX 4090, sm_89)") is None


def test_profiles_agree_with_the_backend(tmp_path):
    backend = RocmBackend(BackendOptions(), root=tree(tmp_path, "A"), device="cpu")
    able = backend.capabilities()
    assert set(PROFILE.kv_block_sizes) == set(able.kv_block_sizes)
    assert set(PROFILE.kv_dtypes) <= set(able.kv_dtypes)
    native = {name for name, kind in PROFILE.weight_formats.items() if kind == "native"}
    assert native <= {name for name, kind in able.weight_formats.items() if kind == "native"}
    fallback = {p.op for p in backend.placement() if p.level != "native"}
    assert fallback == set(PROFILE.fallback_ops)
    data = json.loads(
        (Path(__file__).parents[1] / "halogen_rocm/profiles/strix-halo-128.json").read_text()
    )
    assert data["name"] == "strix-halo-128"
