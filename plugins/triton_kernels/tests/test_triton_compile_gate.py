"""Compiled code of every shipped launch: no spills, no scratch, within LDS, matrix units where meant.

Compilation needs Triton outside the interpreter, hence a process of its own. The default run compiles
the decode path; the slow one everything, against the golden tables, and for gfx1151 with tensors of
other sizes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halogen_triton.resource_page import page, read

GOLDEN = Path(__file__).parent / "golden"
PAGE = Path(__file__).parents[3] / "docs/reference/kernel-resources.md"
DECODE_PATH = (
    "attention direct bf16 28-4x128",
    "linear bf16 rows 1",
    "linear Q4_K rows 1",
    "gated bf16",
    "stream",
    "heads",
    "rms_norm",
    "qkv_rope_store bf16",
    "sample greedy",
)
SHARED_LIMIT = {"gfx1151": 65536, "sm_90": 232448}
REGISTER_LIMIT = {"gfx1151": 256, "sm_90": 255}


def compiled(target, cases):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # numerics and code depend on it, and its default changes with Triton 3.10
    env["TRITON_DEFAULT_FP_FUSION"] = "1"
    command = [sys.executable, "-m", "halogen_triton.compile_gate", target, *cases]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def needs_matrix_units(name):
    return name.endswith(("/prefill", "/decode", "_gemm", "/tile_linear", "/few_rows"))


def judge(target, kernels):
    for name, row in kernels.items():
        assert row["spills"] == 0, (name, row)
        assert row["scratch"] == 0, (name, row)
        assert row["shared"] <= SHARED_LIMIT[target], (name, row)
        assert row["registers"] <= REGISTER_LIMIT[target], (name, row)
        assert (row["matrix"] > 0) == needs_matrix_units(name), (name, row)
        if "gemv" in name or "/dense" in name:
            assert row["wide_loads"] > 0, (name, row)


@pytest.mark.parametrize("target", ["gfx1151", "sm_90"])
def test_decode_path(target):
    kernels = compiled(target, DECODE_PATH)
    assert len(kernels) >= len(DECODE_PATH)
    judge(target, kernels)


@pytest.mark.parametrize("target", ["gfx1151", "sm_90"])
def test_golden_tables_keep_the_rules(target):
    judge(target, read(GOLDEN)[target]["kernels"])


UNMET = """
import json
from halogen_triton.compile_gate import record
from halogen_triton.launch import Tuning, tuning
from halogen_triton.shipped import shipped

met, pick = set(), Tuning.rule

def rule(self, kernel, **shape):
    fitting = (i for i, own in enumerate(self.rules[kernel]) if own.fits(shape))
    met.add((kernel, next(fitting, len(self.rules[kernel]) - 1)))
    return pick(self, kernel, **shape)

Tuning.rule = rule
for case, call in shipped("gfx1151"):
    record(case, call)
every = {(k, i) for k, rules in tuning("gfx1151").rules.items() for i in range(len(rules))}
print(json.dumps(sorted(every - met)))
"""


def test_every_rule_for_gfx1151_has_a_case():
    """Rules that no case takes could spill unseen. (Those of sm_90 ran on a GPU.)"""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", UNMET]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == []


AS_LAUNCHED = """
import json
import sys
from halogen_triton.ahead import compiling_for
from halogen_triton.compile_gate import compile_launch, record
from halogen_triton.shipped import shipped

target, code, *cases = sys.argv[1:]
same = {}
for case, call in shipped(target):
    for launched in record(case, call) if case in cases else ():
        # by place: an argument's name may be one of the launcher's own
        arguments = [launched.arguments[name] for name in launched.kernel.arg_names]
        with compiling_for(target):
            own = launched.kernel.run(*arguments, **launched.options, grid=(1,), warmup=True)
        same[launched.name] = own.asm[code] == compile_launch(launched, target).asm[code]
print(json.dumps(same))
"""


@pytest.mark.parametrize(("target", "code"), [("gfx1151", "amdgcn"), ("sm_90", "ptx")])
def test_what_is_judged_is_what_the_launcher_compiles(target, code, tmp_path):
    """Also where a KV pool is over 2 GiB and the rest of a launch under it."""
    cases = ("attention decode q8_0 9-3x64", "heads", "linear Q4_K rows 1", "sample greedy")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # code names its source files, and a kept one may be of another checkout
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", AS_LAUNCHED, target, code, *cases]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    same = json.loads(done.stdout)
    assert len(same) >= len(cases)
    assert all(same.values()), same


@pytest.mark.slow
@pytest.mark.parametrize("form", ["small", "large"])
def test_tensors_of_other_sizes_on_gfx1151(form):
    kernels = compiled("gfx1151", ("--form", form))
    assert kernels.keys() == read(GOLDEN)["gfx1151"]["kernels"].keys()
    judge("gfx1151", kernels)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gfx1151", "sm_90"])
def test_everything_against_the_golden_table(target):
    import triton

    kernels, golden = compiled(target, ()), read(GOLDEN)[target]
    judge(target, kernels)
    assert kernels.keys() == golden["kernels"].keys()
    if triton.__version__ == golden["triton"]:
        assert kernels == golden["kernels"], (
            "code generation changed: python -m halogen_triton.resource_page"
            " plugins/triton_kernels/tests/golden docs/reference/kernel-resources.md --compile"
        )


def test_the_page_is_current():
    assert PAGE.read_text() == page(read(GOLDEN))
