"""Ids, must-pass lists and tolerances hold together."""

import re

import pytest

from halogen_conformance import LEVELS
from halogen_conformance.catalogue import must_pass_text, suite_cases
from halogen_conformance.freeze import FOLDER
from halogen_conformance.tolerance import Tolerances, table
from halogen_core.spi import OPS, ConfigError


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


def test_quantised_activations_get_room_only_where_they_are_declared_and_used():
    row, declared = table()["linear"], Tolerances(quantized_activations=True)
    plain = Tolerances().allowed("linear", "f32", 64, 0, quantised=True)
    assert declared.allowed("linear", "f32", 64, 0) == plain
    assert declared.allowed("linear", "f32", 64, 0, quantised=True) == plain + row.activations
