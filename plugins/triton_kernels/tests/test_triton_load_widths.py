"""How wide gfx1151 machine code loads what streams, for large KV pools and small ones.

A lane's codes and cache elements come by loads of 16 bytes, and so does its part of x; what is left
are scales and the like, whose share is bounded here. Counted in the loop, per lane and round.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from halogen_triton.launch import tuning

GFX1151 = tuning("gfx1151")
SCRIPT = Path(__file__).parent / "compiled_loads.py"
WIDE = {
    "Q4_0": 0.95,
    "Q4_1": 0.92,
    "Q5_0": 0.88,
    "Q5_1": 0.85,
    "Q4_K": 0.92,
    "Q5_K": 0.85,
    "Q6_K": 0.94,
    "Q8_0": 0.96,
    "MXFP4": 0.97,
    "INT4": 0.94,
    "W8A16": 1.0,
}
"""Least share of 16-byte loads in a GEMV's bytes. A fifth bit comes by 8 bytes a lane."""
WIDE_GATED = {"Q4_K": 0.88, "Q6_K": 0.93}
"""Two weights share x there, so scales weigh more."""
WIDE_ROWS = {
    "Q4_0": 0.94,
    "Q4_1": 0.88,
    "Q5_0": 0.84,
    "Q5_1": 0.80,
    "Q4_K": 0.84,
    "Q5_K": 0.76,
    "Q6_K": 0.74,
    "Q8_0": 0.96,
    "MXFP4": 0.97,
    "INT4": 0.96,
    "W8A16": 1.0,
}
"""The same of more rows, at the fewest (8 where they are compiled)."""
WIDE_CACHE = {"bf16": 1.0, "f8_e5m2": 1.0, "q8_0": 0.94}
"""The same of a decode attention's KV cache: q8_0 has two bytes of scale for 32."""
FEW = (
    "linear Q4_K rows 1",
    "linear Q8_0 rows 8",
    "gated Q6_K",
    "attention direct q8_0 9-3x64",
    "attention direct bf16",
)


def compiled(forms, *cases):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_DEFAULT_FP_FUSION"] = "1"
    command = [sys.executable, SCRIPT, forms, *cases]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def share(asked):
    """Of bytes by 16-byte loads."""
    wide = sum(sizes.get("16", 0) for sizes in asked.values())
    return wide / sum(sum(sizes.values()) for sizes in asked.values())


def judge_gemv(name, loop):
    kind, form = re.match(r"(linear|gated) (\w+)", name).groups()
    launch, gated = GFX1151.launch("plane_gemv", n=18944, k=3584), kind == "gated"
    block = 32 if form in ("Q8_0", "W8A16") else 16
    codes = launch.block_n * launch.block_k // 32 * block // (32 * launch.warps)
    assert loop["bytes"]["codes"] == {"16": codes * (1 + gated)}
    assert loop["bytes"]["x"].keys() == {"16"}
    assert loop["barriers"] == loop["shared"] == 0
    assert share(loop["bytes"]) >= (WIDE_GATED if gated else WIDE)[form], loop


def judge_rows(name, loop):
    form = re.match(r"(?:linear|experts) (\w+)", name).group(1)
    assert loop["bytes"]["codes"].keys() == loop["bytes"]["xrow"].keys() == {"16"}
    assert loop["barriers"] <= 16
    assert share(loop["bytes"]) >= WIDE_ROWS[form], loop


def judge_decode(name, loop):
    store, dim = re.match(r"attention \w+ (\w+) \d+-\d+x(\d+)", name).groups()
    launch = GFX1151.launch("decode", d=int(dim), quant=int(store == "q8_0"))
    element = 2 if store == "bf16" else 1
    cache = 2 * launch.block_n * int(dim) * element // (32 * launch.warps)
    assert loop["bytes"]["data"] == {"16": cache}
    own = {key: sizes for key, sizes in loop["bytes"].items() if key in ("data", "scales")}
    assert share(own) >= WIDE_CACHE[store], loop


def judge(kernels):
    judged = 0
    for name, builds in kernels.items():
        for form, row in builds.items():
            assert row["spills"] == row["scratch"] == 0, (name, form, row)
            if name.endswith("plane_gemv"):
                judge_gemv(name, row["loop"])
            elif name.endswith("plane_gemm"):
                judge_rows(name, row["loop"])
            elif name.endswith("/decode"):
                judge_decode(name, row["loop"])
            else:
                continue
            judged += 1
    return judged


def test_what_streams_comes_by_16_bytes():
    assert judge(compiled("shipped,small", *FEW)) == 2 * (len(FEW) + 1)


@pytest.mark.slow
def test_everything_that_streams_comes_by_16_bytes():
    kernels = compiled("shipped,small")
    assert judge(kernels) >= 2 * (len(WIDE) + len(WIDE_GATED) + 12)
