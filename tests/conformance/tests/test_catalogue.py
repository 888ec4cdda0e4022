"""Ids, must-pass lists and tolerances hold together."""

import re

import pytest

from halogen_conformance import LEVELS
from halogen_conformance.bench import Bench
from halogen_conformance.catalogue import must_pass_text, suite_cases
from halogen_conformance.freeze import FOLDER
from halogen_conformance.tolerance import Tolerances, table
from halogen_core.spi import OPS, Capabilities, ConfigError


@pytest.mark.parametrize("level", LEVELS)
def test_frozen_lists_are_those_of_the_code(level):
    frozen = (FOLDER / f"L{level}.txt").read_text(encoding="utf-8")
    assert frozen == must_pass_text(level), "a new list needs a new SUITE_VERSION once released"


def test_ids_are_plain_and_every_case_says_why():
    for case in suite_cases():
        assert re.fullmatch(r"L[0-5](/[A-Za-z0-9_.@-]+){2,3}", case.id), case.id
        assert len(case.why) > 8, case.id


def test_every_op_is_asked_in_every_dtype():
    asked = {(c.topic, c.opening.dtype) for c in suite_cases() if c.level == 1}
    for op in OPS:
        dtypes = ("f32",) if op == "sample" else ("f32", "f16", "bf16")
        assert {(op, dtype) for dtype in dtypes} <= asked


@pytest.mark.parametrize("factor", [1.5, 0.0, -1.0])
def test_tolerances_can_only_be_tightened(factor):
    with pytest.raises(ConfigError, match="only tighten") as caught:
        Tolerances(tightened={"linear": factor})
    assert caught.value.code == "HRT-6003"


def test_tolerance_grows_with_dtype_and_length_and_shrinks_when_tightened():
    plain = Tolerances()
    assert plain.allowed("linear", "f32", 64, 0) < plain.allowed("linear", "f32", 4096, 0)
    assert plain.allowed("linear", "f32", 64, 0) < plain.allowed("linear", "bf16", 64, 0)
    tight = Tolerances(tightened={"linear": 0.5})
    assert tight.allowed("linear", "f32", 64, 1e-3) == plain.allowed("linear", "f32", 64, 1e-3) / 2


def test_the_spread_of_many_errors_may_differ_less_than_that_of_few():
    few, many = (Tolerances().allowed_spread("linear", "f32", 64, 0.01, n) for n in (48, 4800))
    factor = table()["default"].spread
    assert factor * 0.01 < many < few < 2 * 0.01


@pytest.mark.parametrize("declared", [True, False])
def test_activations_are_rounded_only_where_that_is_declared_and_the_weight_quantised(declared):
    claims = Capabilities(
        name="x", device="x:0", compute_dtypes=("f32",), quantized_activations=declared
    )
    case = suite_cases()[0]
    bench = Bench(backend=None, capabilities=claims, tolerances=Tolerances(), case=case)
    assert bench.arithmetic_for("Q4_K").eight_bit is declared
    assert not bench.arithmetic_for("BF16").eight_bit
