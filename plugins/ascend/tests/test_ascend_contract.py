"""The real torch_npu path, run shape-only on the vendor's own wheel: no NPU, no CANN, no skip.

What holds here: every call exists with these names and types, every tensor is on the device, every
result has the shape and dtype that the next op wants, and our own checks catch what Meta kernels
let through. What does not: numerics and speed. Where the wheel cannot be had the test fails.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ascend_stub_library import VERSION, install, make_stubs

from halogen_ascend import npu

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parent
LOCK = TESTS / "fixtures" / "torch_npu_schemas.txt"


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


SOURCES = sorted(Path(npu.__file__).parent.glob("*.py"))


def named_in_the_source(holder):
    """Names X of `holder.X` in `npu/`, where `holder` is how our code reaches the vendor."""
    found = set()
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        aliases = {holder} | {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and ast.unparse(node.value) == holder
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        found |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases
        }
    return found


def test_every_operator_in_our_source_is_called_here_and_none_beside(lane):
    """A call added without a lane, and one that goes round `calls.py`, both fail."""
    called = {c["op"] for c in lane["calls"]}
    assert called == {f"npu::{name}" for name in named_in_the_source("_npu()")} | {
        "c10d::allreduce_"
    }
    assert named_in_the_source("torch.ops.npu") == set()
    assert named_in_the_source("torch_npu") == {"npu"}, "only the device count"
    assert [p.name for p in SOURCES if "torch.ops.npu" in p.read_text()] == ["calls.py"]
    assert {name for name, count in lane["functions"].items() if not count} == set()


def test_every_runtime_call_in_our_source_is_made_here(lane):
    """Each was bound to torch_npu's own signature as it was made."""
    wanted = named_in_the_source("_runtime()") | named_in_the_source("self.runtime")
    told = {name.partition(".")[0] for name in lane["graph"]}
    # opening a device and asking for its memory need one
    assert wanted - told == {"set_device", "mem_get_info"}
    assert set(lane["signatures"]) == {"set_device", "mem_get_info"}


def test_signatures_are_those_that_the_code_was_written_for(lane):
    """Drift of the wheel: a renamed argument or another default shows here, with both texts."""
    locked = dict(
        line.split(" ", 1) for line in LOCK.read_text().splitlines() if not line.startswith("#")
    )
    vendors = {k: v for k, v in lane["schemas"].items() if k.startswith("npu::")}
    assert vendors == locked


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


def test_experts_are_routed_and_grouped_by_counts(lane):
    for call in calls_of(lane, "npu::npu_grouped_matmul"):
        assert call["named"]["group_list_type"] == 1
        assert call["named"]["split_item"] == 2
        assert next(t for t in call["tensors"] if t[0] == "group_list")[2] == "int64"
        (_, _, _, rows), (_, _, _, weights), _ = call["tensors"]
        assert rows[1] == weights[1], "experts are [E, K, N]"
    (gate,) = calls_of(lane, "npu::npu_moe_gating_top_k_softmax")
    assert [o[2] for o in gate["out"]] == ["float16", "int32", "int32"]
    (route,) = calls_of(lane, "npu::npu_moe_init_routing_v2")
    tokens, experts = (t[3] for t in route["tensors"])
    assert route["named"]["active_num"] == tokens[0] * experts[1]
    # counts per expert, not their running sum: what `group_list_type` 1 wants
    assert route["named"]["expert_tokens_num_type"] == 1
    assert route["named"]["active_expert_range"] == [0, route["named"]["expert_num"]]


@pytest.mark.parametrize(
    ("op", "inputs", "outputs"),
    [
        ("npu_rms_norm", ["float16"] * 2, ["float16", "float32"]),
        ("npu_add_rms_norm", ["float16"] * 3, ["float16", "float32", "float16"]),
        ("npu_rotary_mul", ["float16"] * 3, ["float16"]),
        ("npu_swiglu", ["float16"], ["float16"]),
        ("npu_dynamic_quant", ["float16"], ["int8", "float32"]),
        ("npu_weight_quant_batchmatmul", ["float16", "int8", "float16"], ["float16"]),
        ("npu_format_cast", ["int8"], ["int8"]),
    ],
)
def test_types_agree_within_a_call(lane, op, inputs, outputs):
    """Meta kernels take a float32 weight beside float16 rows; the device does not."""
    for call in calls_of(lane, f"npu::{op}"):
        assert [t[2] for t in call["tensors"]] == inputs
        assert [t[2] for t in call["out"]] == outputs


def test_shapes_are_those_that_the_operators_document(lane):
    for call in calls_of(lane, "npu::npu_rotary_mul"):
        x, cos, sin = (t[3] for t in call["tensors"])
        assert cos == sin == [1, x[1], 1, x[3]]
        assert x[3] % 2 == 0
    modes = {(*c["plain"], "half")[0] for c in calls_of(lane, "npu::npu_rotary_mul")}
    assert modes == {"half", "interleave"}
    for call in calls_of(lane, "npu::npu_swiglu"):
        assert 2 * call["out"][0][3][-1] == call["tensors"][0][3][-1]
    for call in calls_of(lane, "npu::npu_weight_quant_batchmatmul"):
        (_, _, _, x), (_, _, _, weight), (_, _, _, scale) = call["tensors"]
        assert (x[1], scale) == (weight[0], [weight[1]])
    assert {tuple(c["plain"]) for c in calls_of(lane, "npu::npu_format_cast")} == {(29,), (2,)}


def test_sinks_take_the_second_operator_with_its_own_names(lane):
    for overload in ("default", "out"):
        for call in calls_of(lane, "npu::npu_fused_infer_attention_score_v2", overload):
            named = call["named"]
            assert len(named["actual_seq_qlen"]) == len(named["actual_seq_kvlen"])
            assert named["num_query_heads"] == call["tensors"][0][3][1]
            sink = next(t for t in call["tensors"] if t[0] == "learnable_sink")
            assert sink[3] == [named["num_query_heads"]]


def test_ranks_sum_the_partial_product_in_place(lane):
    (call,) = calls_of(lane, "c10d::allreduce_")
    assert call["tensors"] == [["", "npu", "float16", [5, 64]]]


def test_no_private_layout_is_viewed(lane):
    assert calls_of(lane, "npu::npu_format_cast")
    assert lane["nz_touched"] == []


def test_a_captured_call_is_a_task_group_behind_an_event(lane):
    assert lane["graph"] == [
        *("NPUGraph", "graph", "current_stream"),
        *("ExternalEvent", "ExternalEvent.wait", "ExternalEvent.reset"),
        *("graph_task_group_begin", "graph_task_group_end", "Stream"),
        # the replay starts first and waits for its event: the other order never ends
        *("NPUGraph.replay", "stream"),
        *("graph_task_update_begin", "graph_task_update_end", "ExternalEvent.record"),
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
