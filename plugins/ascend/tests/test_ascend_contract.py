"""The real torch_npu path, run shape-only on the vendor's own wheel: no NPU, no CANN, no skip.

What holds here: every call exists with these names and types, every tensor is on the device, every
result has the shape and dtype that the next op wants, and our own checks catch what Meta kernels
let through. What does not: numerics and speed. Where the wheel cannot be had the test fails.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ascend_stub_library import VERSION, install, make_stubs

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def lane(tmp_path_factory):
    assert torch.__version__.partition("+")[0] == VERSION, "torch-npu wants exactly its torch"
    folder = tmp_path_factory.mktemp("torch_npu")
    site = install(folder)
    symbols = make_stubs(site, folder / "stubs")
    assert 50 < len(symbols) < 400
    environment = {
        **os.environ,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "LD_LIBRARY_PATH": str(folder / "stubs"),
        "PYTHONPATH": os.pathsep.join([str(site), str(TESTS)]),
    }
    done = subprocess.run(
        [sys.executable, TESTS / "ascend_contract_lane.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    text = done.stdout[done.stdout.index('{"calls"') :]
    return json.JSONDecoder().raw_decode(text)[0]


def calls_of(lane, op, overload="default"):
    found = [c for c in lane["calls"] if c["op"] == op and c["overload"] == overload]
    assert found, f"{op}.{overload} was never called"
    return found


def test_every_tensor_of_every_call_is_on_the_device(lane):
    for call in lane["calls"]:
        assert {t[1] for t in call["tensors"]} == {"npu"}, call


def test_every_operator_of_the_design_is_called(lane):
    assert {c["op"].removeprefix("npu::") for c in lane["calls"]} == {
        "npu_fused_infer_attention_score",
        "npu_fused_infer_attention_score_v2",
        "_npu_fused_infer_attention_score_get_max_workspace",
        "npu_scatter_pa_kv_cache",
        "npu_rms_norm",
        "npu_add_rms_norm",
        "npu_rotary_mul",
        "npu_swiglu",
        "npu_dynamic_quant",
        "npu_quant_matmul",
        "npu_weight_quant_batchmatmul",
        "npu_format_cast",
        "npu_moe_gating_top_k_softmax",
        "npu_moe_init_routing_v2",
        "npu_grouped_matmul",
    }


def test_paged_attention_has_host_lists_of_the_right_kind(lane):
    prefill, *_ = calls_of(lane, "npu::npu_fused_infer_attention_score")
    assert prefill["named"]["actual_seq_lengths"] == [150]
    mixed = [
        c["named"]
        for c in calls_of(lane, "npu::npu_fused_infer_attention_score")
        if c["named"]["actual_seq_lengths_kv"] == [151, 9]
    ]
    # query ends are cumulative, KV lengths per request: the rule of a paged call
    assert all(named["actual_seq_lengths"] == [1, 10] for named in mixed)
    assert len(mixed) == 2
    assert {(m["sparse_mode"], m.get("pre_tokens")) for m in mixed} == {(3, None), (4, 39)}
    for call in calls_of(lane, "npu::npu_fused_infer_attention_score"):
        named = call["named"]
        assert named["input_layout"] == "TND"
        assert named["block_size"] % 128 == 0
        (_, _, _, query), (_, _, _, key), *rest = call["tensors"]
        assert key[1:] == [named["block_size"], named["num_key_value_heads"] * query[2]]
        table = next(t for t in rest if t[0] == "block_table")
        assert table[2] == "int32"
        mask = next(t for t in rest if t[0] == "atten_mask")
        assert mask[2:] == ["bool", [2048, 2048]]
        assert call["out"][0][3] == query


def test_kv_is_written_in_norm_mode_with_one_index_type(lane):
    for call in calls_of(lane, "npu::npu_scatter_pa_kv_cache"):
        assert call["named"]["cache_mode"] == "Norm"
        assert call["tensors"][4][2] == "int32"


def test_int8_products_say_their_output_type(lane):
    for call in calls_of(lane, "npu::npu_quant_matmul"):
        assert call["out"][0][2] == "float16"
        assert [t[2] for t in call["tensors"][:3]] == ["int8", "int8", "float32"]
        assert "pertoken_scale" in [t[0] for t in call["tensors"]]


def test_experts_are_grouped_by_counts(lane):
    for call in calls_of(lane, "npu::npu_grouped_matmul"):
        assert call["named"]["group_list_type"] == 1
        assert call["named"]["split_item"] == 2
        assert next(t for t in call["tensors"] if t[0] == "group_list")[2] == "int64"


def test_no_private_layout_is_viewed(lane):
    assert calls_of(lane, "npu::npu_format_cast")
    assert lane["nz_touched"] == []


def test_a_captured_call_is_a_task_group_behind_an_event(lane):
    assert lane["graph"] == [
        *("current_stream", "ExternalEvent", "wait", "reset"),
        *("graph_task_group_begin", "graph_task_group_end"),
        *("stream", "graph_task_update_begin", "graph_task_update_end", "record"),
    ]
    first, second = calls_of(lane, "npu::npu_fused_infer_attention_score", "out")
    assert first["named"]["actual_seq_lengths_kv"] == [11, 21]
    assert second["named"]["actual_seq_lengths_kv"] == [12, 22]


def test_what_meta_kernels_accept_is_refused_by_us(lane):
    assert [(name, kind) for name, kind, _ in lane["refused"]] == [
        ("block size 100", "ConfigError"),
        ("float32 to NZ", "LayoutError"),
        ("int8 too wide", "UnsupportedOp"),
        ("host tensor in a device op", "FakeTensorDeviceMismatchError"),
    ]
