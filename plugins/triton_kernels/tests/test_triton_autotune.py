"""Tuning by measuring: what is met is measured, better launches are kept, wrong ones never.

The clock is the test's own: on a CPU the interpreter's times say nothing of a GPU.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

from halogen_core.spi import BackendOptions, ConfigError, WeightRole
from halogen_core.spi.testing import f32_tensor
from halogen_triton import autotune, tuned
from halogen_triton.backend import TritonBackend
from halogen_triton.launch import tuning

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_backend import SMALL

DEVICE = os.environ.get("HALOGEN_TEST_DEVICE", "cpu")


class Clocked(TritonBackend):
    """Whose time is a function of the launch in force."""

    def _seconds(self, call):
        call()
        launch = self.triton_ops.tuning.rules["dense_gemv"][0].launch
        # best at 16 columns and 2 warps; 8 warps are best of all but do not compile
        return abs(launch.block_n - 16) + abs(launch.warps - 2) + 1


def opened(tmp_path, **extra):
    options = BackendOptions(cache_dir=str(tmp_path), extra={"dtype": "f32", **extra})
    return Clocked(options, tuning=SMALL, device=DEVICE)


def rehearse(backend):
    weight = backend.pack([f32_tensor("w", torch.randn(64, 64).numpy())], WeightRole.LINEAR)
    x = torch.randn(1, 64, device=DEVICE)

    def run():
        for _ in range(3):
            backend.ops.linear(x, weight)

    return run


def test_better_launches_are_found_and_kept(tmp_path):
    backend = opened(tmp_path)
    said = []
    where = backend.tune(rehearse(backend), said.append)
    rule = tuned.read(str(tmp_path), "test").kernels["dense_gemv"][0]
    assert (rule["launch"]["block_n"], rule["launch"]["warps"]) == (16, 2)
    assert rule["bounds"] == rule["least"], "for the shape that was measured alone"
    assert len(said) == 1
    assert backend.triton_ops.tuning.launch("dense_gemv", **rule["bounds"]).block_n == 16, "at once"
    assert Path(where).exists()
    shape = rule["bounds"]
    assert tuning("test", str(tmp_path)).launch("dense_gemv", **shape).block_n == 16
    other = {**shape, "n": shape["n"] + 64}
    generic = tuning("test").launch("dense_gemv", **other)
    assert tuning("test", str(tmp_path)).launch("dense_gemv", **other) == generic


def test_recording_ends_with_the_rehearsal(tmp_path):
    backend = opened(tmp_path)
    with autotune.met(backend.triton_ops) as calls:
        rehearse(backend)()
    assert [one.op for one in calls] == ["linear"], "once per class of call"
    assert "linear" not in vars(backend.triton_ops)


def test_a_launch_with_other_numbers_is_no_candidate(tmp_path):
    backend = opened(tmp_path)
    ops = backend.triton_ops
    weight = backend.pack([f32_tensor("w", torch.randn(64, 64).numpy())], WeightRole.LINEAR)
    x = torch.randn(1, 64, device=DEVICE)

    def wrong_where_fast():
        y = ops.linear(x, weight)
        return y if ops.tuning.rules["dense_gemv"][0].launch.block_n == 64 else y + 1

    def faster_when_smaller(call):
        call()
        return float(ops.tuning.rules["dense_gemv"][0].launch.block_n)

    found = autotune.measure(
        ops, [autotune.Met("linear", wrong_where_fast)], faster_when_smaller, print
    )
    assert all(rule["launch"]["block_n"] == 64 for rule in found.get("dense_gemv", []))
    assert ops.tuning is backend.tuning, "the table in force comes back"


def test_a_launch_that_fails_is_no_candidate(tmp_path):
    backend = opened(tmp_path)
    ops = backend.triton_ops
    weight = backend.pack([f32_tensor("w", torch.randn(64, 64).numpy())], WeightRole.LINEAR)
    x = torch.randn(1, 64, device=DEVICE)

    def call():
        if ops.tuning.rules["dense_gemv"][0].launch.warps != 4:
            raise RuntimeError("out of resources: registers")
        return ops.linear(x, weight)

    found = autotune.measure(
        ops, [autotune.Met("linear", call)], lambda call: (call(), 1.0)[1], print
    )
    assert found == {}


def test_without_a_cache_folder_nothing_is_measured_in_vain():
    backend = Clocked(BackendOptions(extra={"dtype": "f32"}), tuning=SMALL, device=DEVICE)
    with pytest.raises(ConfigError, match="no cache folder"):
        backend.tune(lambda: pytest.fail("measured"), print)
