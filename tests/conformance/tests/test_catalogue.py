"""Ids, must-pass lists and tolerances hold together."""

import hashlib
import re

import pytest

from halogen_conformance import LEVELS
from halogen_conformance.bench import Bench
from halogen_conformance.case import Filtered
from halogen_conformance.catalogue import must_pass_text, suite_cases
from halogen_conformance.freeze import FOLDER
from halogen_conformance.oracle.formats import ALL, DENSE
from halogen_conformance.oracle.scaled import FLOAT8
from halogen_conformance.tolerance import Tolerances, table
from halogen_core.spi import OPS, Capabilities, ConfigError

FIRST_LISTS = "c9f09fa510e7485f659abdcaa31898dd48b5bb8727b3f75fcd089cc47de9f817"
"""Of suite 1.0; its reports name it."""


@pytest.mark.parametrize("level", LEVELS)
def test_frozen_lists_are_those_of_the_code(level):
    frozen = (FOLDER / f"L{level}.txt").read_text(encoding="utf-8")
    assert frozen == must_pass_text(level), "a new list needs a new SUITE_VERSION once released"


def test_ids_are_plain_and_every_case_says_why():
    for case in suite_cases():
        assert re.fullmatch(r"L[0-5](/[A-Za-z0-9_.@-]+){2,3}", case.id), case.id
        assert len(case.why) > 8, case.id


def test_the_lists_of_earlier_versions_are_kept():
    digest = hashlib.sha256()
    for level in LEVELS:
        digest.update((FOLDER.parent / "1.0" / f"L{level}.txt").read_bytes())
    assert digest.hexdigest() == FIRST_LISTS


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


@pytest.fixture
def bench():
    """Of a backend with these claims, closed: for questions about the reference."""

    def make(**claims):
        own = Capabilities(name="x", device="x:0", compute_dtypes=("f32",), **claims)
        tolerances = Tolerances()
        return Bench(backend=None, capabilities=own, tolerances=tolerances, case=suite_cases()[0])

    return make


@pytest.mark.parametrize("declared", [True, False])
def test_activations_are_rounded_only_where_that_is_declared_and_the_weight_quantised(
    bench, declared
):
    own = bench(quantized_activations=declared)
    for form in ("Q4_K", "INT4", "MXFP4", "W8A16"):
        assert own.arithmetic_for(form).rounding == ("block" if declared else "")
    for form in (*DENSE, *FLOAT8):
        assert own.arithmetic_for(form).rounding == ""
    assert own.arithmetic_for("W8A8").rounding == "token"


@pytest.mark.parametrize("kind", ["native", "emulated"])
def test_only_emulated_8_bit_floats_may_be_kept_in_16_bits(bench, kind):
    own = bench(weight_formats=dict.fromkeys(ALL, kind))
    narrow = {form for form in ALL if own.arithmetic_for(form).weights}
    assert narrow == (set(FLOAT8) if kind == "emulated" else set())


def test_a_format_is_filtered_where_it_is_not_claimed(bench):
    bench(weight_formats={"INT4": "native"}).require_format("INT4")
    bench().require_format("INT4")
    with pytest.raises(Filtered, match="weight_formats:INT4"):
        bench(weight_formats={"F32": "native"}).require_format("INT4")
