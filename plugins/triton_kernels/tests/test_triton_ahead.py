"""Kernels compiled ahead: counted by Triton itself, kept over starts, checked when read.

Compilation needs Triton outside the interpreter, hence processes of their own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halogen_triton import tuned
from halogen_triton.launch import tuning

OPEN = """
import json, sys
import torch
from halogen_core.spi import Activation, BackendOptions, WeightRole
from halogen_core.spi.testing import f32_tensor, tiny_checkpoint
from halogen_triton.ahead import AheadBackend

backend = AheadBackend(BackendOptions(cache_dir=sys.argv[1]), arch=sys.argv[2], name="test")
"""
COUNT = """
counts = backend.kernel_counts()
print(json.dumps([counts.compiled, counts.loaded, counts.rebuilt]))
"""
OPS = """
import numpy as np
x = torch.empty(3, 64, device="meta", dtype=torch.bfloat16)
norm = backend.pack([f32_tensor("n", np.ones(64))], WeightRole.NORM)
backend.ops.rms_norm(x, norm, eps=1e-5)
backend.ops.add_rms_norm(x, x, norm, eps=1e-5)
backend.ops.gated_act(x, Activation.SILU)
backend.ops.gated_act(x, Activation.GELU_TANH)
"""
STEPS = """
from halogen_core.engine.building import assemble_engine
from halogen_core.engine.options import EngineOptions
from halogen_core.engine.rehearsal import rehearse, step_kinds
from halogen_core.models import config_of
checkpoint = tiny_checkpoint(quant="Q8_0", hidden=64, head_dim=32, inner=64)
options = EngineOptions(model_path="", model_id="", end_token_ids=[], max_batch=2)
engine = assemble_engine(options, backend, checkpoint, config_of(checkpoint))
for kind in step_kinds(backend.limits(), max_batch=2, max_tokens=17, context=256):
    step = rehearse(kind, engine.runner.kv, vocab=engine.info.vocab_size)
    engine.runner.step(step.batch, step.shape)
assert engine.runner.captured_steps and engine.runner.eager_steps
"""


SERVED = """
import numpy as np
from halogen_core.engine.protocol import GenerateRequest, SamplingParams
from halogen_core.engine.building import assemble_engine
from halogen_core.engine.options import EngineOptions
from halogen_core.engine.rehearsal import rehearse, step_kinds
from halogen_core.models import config_of
checkpoint = tiny_checkpoint(quant="Q8_0", hidden=64, head_dim=32, inner=64)
options = EngineOptions(
    model_path="", model_id="", end_token_ids=[], max_batch=6, max_batch_tokens=64
)
engine = assemble_engine(options, backend, checkpoint, config_of(checkpoint))
if sys.argv[3] == "warm up":
    for kind in step_kinds(backend.limits(), max_batch=6, max_tokens=64, context=256):
        step = rehearse(kind, engine.runner.kv, vocab=engine.info.vocab_size)
        for _ in range(3):
            engine.runner.step(step.batch, step.shape)
else:
    rng = np.random.default_rng(0)
    kinds = (
        {}, {"temperature": 0.7, "top_k": 9, "min_p": 0.1}, {"repetition_penalty": 1.3},
        {"logit_bias": {5: 1.0}}, {"temperature": 1.0}, {},
    )
    for turn in range(3):
        for number, sampling in enumerate(kinds[: 6 - turn]):
            engine.submit(GenerateRequest(
                request_id=f"{turn}.{number}",
                prompt_token_ids=rng.integers(1, 90, 3 + 17 * number + turn).tolist(),
                max_tokens=5 + number, sampling=SamplingParams(**sampling), ignore_eos=True,
                num_logprobs=0 if number == 5 else -1,
            ))
        while engine.has_work:
            assert all(out.finish_reason != "error" for out in engine.step())
"""


SHAPES = """
import resource
import numpy as np
from halogen_core.spi import QuantTensor
n, k = 1 << 15, 1 << 15
path = sys.argv[1] + "/weights"
with open(path, "wb") as file:
    file.truncate(n * k // 32 * 34)
data = np.memmap(path, np.uint8, mode="r")
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
before = peak()
backend.pack([QuantTensor(format="Q8_0", shape=(n, k), data=data, name="w")], WeightRole.LINEAR)
assert peak() - before < 100 << 20, peak() - before
"""


LENGTHS = """
from halogen_triton.attention import HeadShape, LayerKV, Sequences, attention
from halogen_triton.linear import linear
from halogen_triton.int8 import Int8
from halogen_triton.launch import tuning

def ints(*shape):
    return torch.empty(*shape, dtype=torch.int32, device="meta")

def half(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

table = tuning(sys.argv[2])
plan = backend.triton_ops.attention_plan(64, quantised=False)
shape = HeadShape(num_heads=2, num_kv_heads=1, head_dim=64, scale=1.0)
kv = LayerKV(data=half(8, 2, 1, 16, 64))
weight = Int8(torch.empty(64, 64, dtype=torch.int8, device="meta"), torch.empty(64, device="meta"))
for sequences, width, tokens in ((1, 1, 21), (2, 32, 32), (2, 5, 40)):
    prompts = Sequences(
        starts=ints(sequences + 1), seq_lens=ints(sequences), tables=ints(sequences, width),
        num_tokens=tokens, max_query_len=tokens, has_decodes=False, has_prefills=True,
    )
    attention(half(tokens, 128), kv, prompts, shape, plan)
    linear(half(tokens, 64), weight, table)
"""


def start(folder, arch="gfx1151", *, work=OPS, argument=""):
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "TRITON_CACHE_DIR")}
    command = [sys.executable, "-c", OPEN + work + COUNT, str(folder), arch, argument]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_damage_is_repaired(tmp_path):
    (compiled, loaded, rebuilt), _ = start(tmp_path)
    assert compiled == 4
    assert (loaded, rebuilt) == (0, 0)
    binaries = sorted(tmp_path.glob("kernels/triton-*/gfx1151/*/*.hsaco"))
    assert len(binaries) == compiled
    whole = binaries[0].read_bytes()
    binaries[0].write_bytes(whole[: len(whole) // 2])
    metadata = next(binaries[1].parent.glob("[!_]*.json"))
    metadata.write_bytes(b"")
    next(binaries[2].parent.glob("__grp__*.json")).write_text("{")
    binaries[3].unlink()
    counts, told = start(tmp_path)
    assert counts == [4, compiled - 4, 4]
    assert told.count("is damaged") == 4
    assert binaries[0].read_bytes() == whole
    assert start(tmp_path)[0] == [0, compiled, 0]


FOLDER = """
import sys
from pathlib import Path
from triton import knobs
from halogen_core.spi import ConfigError
from halogen_triton import kernel_cache

root = Path(sys.argv[1])
(root / "file").write_text("")
try:
    kernel_cache.keep(str(root / "file"), "gfx1151")
except ConfigError as exc:
    print(exc.code, "file" in str(exc))
for arch in ("sm_90", "gfx1151"):
    kernel_cache.keep(str(root / "cache"), arch)
    print(knobs.cache.dir.endswith(arch))
# a full disk, as far as a user without it can tell: what is to be written is a folder
entry = kernel_cache.CheckedCache("ab" * 32)
(Path(entry.cache_dir) / "kernel.json").mkdir()
try:
    entry.put("{}", "kernel.json", binary=False)
except ConfigError as exc:
    print(exc.code, "--cache-dir" in exc.fix)
"""


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    """At the start, and not by a trace of Triton's in the first step."""
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "TRITON_CACHE_DIR")}
    command = [sys.executable, "-c", FOLDER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    told = ["HRT-3416 True", "True", "True", "HRT-3416 True"]
    assert done.stdout.splitlines() == told
    # a user's own choice stands
    env["TRITON_CACHE_DIR"] = str(tmp_path / "mine")
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert done.stdout.splitlines() == ["False", "False", "HRT-3416 True"]
    assert (tmp_path / "mine").is_dir()


def test_no_weight_is_read_where_shapes_are_enough(tmp_path):
    """A gigabyte of weights, of which not a tenth comes into memory."""
    start(tmp_path, work=SHAPES)


def test_numbers_of_sequences_tokens_and_blocks_share_a_kernel(tmp_path):
    """A prompt alone and beside the padding of its bucket: attention, rounding, product."""
    (compiled, *_), _ = start(tmp_path, work=LENGTHS)
    assert compiled == 3


@pytest.mark.slow
def test_every_step_of_a_model_is_compiled_once(tmp_path):
    (compiled, loaded, _), _ = start(tmp_path, work=STEPS)
    assert compiled > 10
    assert loaded == 0
    assert start(tmp_path, work=STEPS)[0] == [0, compiled, 0]


@pytest.mark.slow
def test_requests_compile_nothing_after_a_warm_up(tmp_path):
    """Prompts beside answers, by number of sequences; sampling of every sort; grammar masks apart."""
    start(tmp_path, work=SERVED, argument="warm up")
    (compiled, loaded, _), _ = start(tmp_path, work=SERVED, argument="serve")
    assert compiled == 0
    assert loaded > 10


@pytest.mark.slow
def test_archs_do_not_share_a_cache(tmp_path):
    (first, *_), _ = start(tmp_path, "gfx1151")
    (second, loaded, _), _ = start(tmp_path, "sm_90")
    assert first == second == 4
    assert loaded == 0


def test_nothing_compiles_in_the_interpreter():
    from halogen_core.spi import BackendOptions, ConfigError
    from halogen_triton.ahead import AheadBackend

    with pytest.raises(ConfigError, match="interpreter"):
        AheadBackend(BackendOptions(), arch="gfx1151", name="test")


RULE = {"launch": {"block_n": 32, "block_k": 512}, "bounds": {"n": 7}, "least": {"n": 7}}


def test_measured_launches_come_first_and_survive(tmp_path):
    shipped = tuning("gfx1151").launch("dense_gemv", m=1, n=7, k=512)
    found = tuned.Tuned(kernels={"dense_gemv": [RULE]}, flash_threshold=4096)
    tuned.write(str(tmp_path), "gfx1151", found)
    own = tuning("gfx1151", str(tmp_path))
    assert own.launch("dense_gemv", m=1, n=7, k=512).block_n == 32 != shipped.block_n
    assert own.launch("dense_gemv", m=1, n=6, k=512) == tuning("gfx1151").launch(
        "dense_gemv", m=1, n=6, k=512
    )
    assert tuned.read(str(tmp_path), "gfx1151").flash_threshold == 4096
    assert "measured on this machine" in own.source
    assert tuning("sm_90", str(tmp_path)) == tuning("sm_90"), "another arch has its own file"


@pytest.mark.parametrize("harm", ["truncate", "edit", "foreign", "schema"])
def test_a_damaged_table_is_refused_with_a_warning(tmp_path, caplog, harm):
    path = Path(tuned.write(str(tmp_path), "gfx1151", tuned.Tuned(kernels={"dense_gemv": [RULE]})))
    text = path.read_text()
    changed = {
        "truncate": text[: len(text) // 2],
        "edit": text.replace('"block_n": 32', '"block_n": 16'),
        "foreign": text.replace('"triton": "', '"triton": "0.'),
        "schema": None,
    }[harm]
    if changed is None:
        tuned.write(
            str(tmp_path), "gfx1151", tuned.Tuned(kernels={"dense_gemv": [{"launch": {"warp": 1}}]})
        )
    else:
        path.write_text(changed)
    assert tuning("gfx1151", str(tmp_path)) == tuning("gfx1151")
    assert ("is refused" in caplog.text) or ("are ignored" in caplog.text)
    tuned.write(str(tmp_path), "gfx1151", tuned.Tuned(kernels={"dense_gemv": [RULE]}))
    assert tuning("gfx1151", str(tmp_path)) != tuning("gfx1151")
