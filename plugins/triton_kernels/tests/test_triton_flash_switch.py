"""The flash threshold changes while running: which path is taken changes, the numbers do not."""

import sys
from pathlib import Path

import numpy as np
import pytest

from halogen_core.engine.batch import build_step
from halogen_core.engine.building import assemble_engine
from halogen_core.engine.options import EngineOptions
from halogen_core.models import config_of
from halogen_core.spi import Adjustable, BackendOptions, CompilesKernels, ConfigError, Tunes
from halogen_triton import tuned
from halogen_triton.capture import BUCKETS
from halogen_triton.options import buckets

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_backend import MODELS, item, open_runner, triton_backend
from tiny_models import tiny


def test_the_boundary_is_exact_and_both_paths_agree():
    runner = open_runner(triton_backend(flash_threshold="1000"), tiny(layers=1))
    tokens = np.random.default_rng(3).integers(0, 128, 40).tolist()
    runner.logits(build_step([item(tokens, 0, 30, [7, 2, 4])], 16).batch)
    batch = build_step([item(tokens, 30, 1, [7, 2, 4])], 16).batch
    calls = runner.backend.triton_ops.attention_calls
    found = {}
    for threshold, path in ((32, "direct"), (31, "direct"), (30, "flash"), (0, "flash")):
        before = calls.copy()
        runner.backend.adjust("flash_threshold", str(threshold))
        found[threshold] = runner.logits(batch)
        assert calls - before == {path: 1}, threshold
    scale = np.abs(found[0]).max()
    for logits in found.values():
        assert np.abs(logits - found[0]).max() <= 1e-5 * scale
    counters = runner.backend.counters().counters
    assert (counters["attention_calls_direct"], counters["attention_calls_flash"]) == (2, 2)


def test_an_engine_changes_it_between_steps():
    checkpoint = MODELS["qwen2 f32"]
    options = EngineOptions(model_path="", model_id="", end_token_ids=[], max_batch=2)
    engine = assemble_engine(options, triton_backend(), checkpoint, config_of(checkpoint))
    assert engine.adjust({}) == {"flash_threshold": "256"}
    assert engine.adjust({"flash_threshold": "0"}) == {"flash_threshold": "0"}
    for wrong in ({"flash_threshold": "much"}, {"dtype": "f16"}):
        with pytest.raises(ConfigError):
            engine.adjust(wrong)
    assert engine.adjust({}) == {"flash_threshold": "0"}


def test_a_remembered_threshold_is_the_next_default(tmp_path):
    def opened(**extra):
        backend = triton_backend(**extra)
        return type(backend)(
            BackendOptions(cache_dir=str(tmp_path), extra={"dtype": "f32", **extra}),
            tuning=backend.tuning, device="cpu",
        )  # fmt: skip

    where = opened().remember("flash_threshold", "300")
    assert Path(where).is_relative_to(tmp_path)
    assert opened().adjustable() == {"flash_threshold": "300"}
    assert opened(flash_threshold="7").adjustable() == {"flash_threshold": "7"}, "a flag wins"
    Path(where).write_text("{")
    assert opened().adjustable() == {"flash_threshold": "256"}
    assert tuned.read(str(tmp_path), "test") == tuned.Tuned()


def test_what_the_backend_can_do_beside_the_protocol():
    backend = triton_backend()
    assert isinstance(backend, Adjustable)
    assert isinstance(backend, CompilesKernels)
    assert isinstance(backend, Tunes)


def test_bucket_lists():
    assert buckets(None) == BUCKETS
    assert buckets("8,1,4,4") == (1, 4, 8)
    for wrong in ("", "a", "0,1", "1;2"):
        with pytest.raises(ConfigError, match="buckets"):
            buckets(wrong)


def test_damaged_weights_and_uneven_heads_are_refused():
    import attrs
    import torch

    from halogen_core.spi import AttentionSpec, ModelError, UnsupportedOp, WeightRole

    backend = triton_backend()
    whole = tiny(layers=1, form="Q8_0").tensor("blk.0.attn_q.weight")
    for data in (whole.data[:-1], whole.data[:34]):
        with pytest.raises(ModelError, match="bytes: expected"):
            backend.pack([attrs.evolve(whole, data=data)], WeightRole.LINEAR)
    runner = open_runner(backend, tiny(layers=1))
    meta = backend.upload_step(build_step([item([1, 2], 0, 2, [0])], 16).batch)
    spec = AttentionSpec(num_heads=3, num_kv_heads=2, head_dim=16, scale=1.0)
    with pytest.raises(UnsupportedOp, match="3 query heads"):
        backend.ops.attention(torch.zeros(2, 48), runner.kv, 0, meta, spec)
