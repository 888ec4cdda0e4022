"""What of a stored weight is refused before anything reads it."""

import attrs
import numpy as np
import pytest
from scaled_tensors import int4, int8, mxfp4

from halogen_core.errors import ModelError
from halogen_core.spi import QuantTensor, check_weight

SHAPE = (2, 4, 64)


def made(form):
    rng = np.random.default_rng(1)
    if form == "INT4":
        return int4(rng, SHAPE, 16, perm=True)[0]
    if form == "Q4_0":
        data = np.zeros(2 * 4 * 64 // 32 * 18, np.uint8)
        return QuantTensor(format=form, shape=SHAPE, data=data, name="w")
    return (mxfp4(rng, SHAPE) if form == "MXFP4" else int8(rng, SHAPE, form))[0]


FORMS = ("INT4", "W8A16", "W8A8", "MXFP4", "Q4_0")


def spoiled(tensor, key, change):
    return attrs.evolve(tensor, aux={**tensor.aux, key: change(tensor.aux[key])})


def refusal(tensor):
    with pytest.raises(ModelError) as caught:
        check_weight(tensor)
    return caught.value


@pytest.mark.parametrize("form", FORMS)
def test_a_whole_one_passes_and_a_byte_more_or_less_does_not(form):
    tensor = made(form)
    check_weight(tensor)
    for data in (tensor.data[1:], np.append(tensor.data, np.uint8(0))):
        assert refusal(attrs.evolve(tensor, data=data)).code == "HRT-2411"


@pytest.mark.parametrize("form", ["INT4", "W8A16", "W8A8"])
def test_scales_are_one_for_each_row_or_group(form):
    tensor = made(form)
    assert refusal(attrs.evolve(tensor, aux={})).code == "HRT-2411"
    for change in (lambda a: a[:1], lambda a: a[..., :-1], lambda a: a[..., None]):
        error = refusal(spoiled(tensor, "scale", change))
        assert error.code == "HRT-2411"
        assert "scale" in error.message


def test_zeros_and_the_order_of_columns_fit_too():
    tensor = made("INT4")
    check_weight(attrs.evolve(tensor, aux={"scale": tensor.aux["scale"]}))
    for key, change in (
        ("zero", lambda a: a[..., :-1]),
        ("perm", lambda a: a[:-1]),
        ("perm", np.zeros_like),
        ("perm", lambda a: a + 1),
    ):
        assert refusal(spoiled(tensor, key, change)).code == "HRT-2411", key


def test_groups_are_equal():
    tensor = made("INT4")
    error = refusal(spoiled(tensor, "scale", lambda a: np.ones((2, 4, 5), a.dtype)))
    assert "equal groups" in error.message


def test_an_unknown_format_names_those_that_are_known():
    error = refusal(attrs.evolve(made("Q4_0"), format="INT3"))
    assert error.code == "HRT-2410"
    assert all(form in error.message for form in (*FORMS, "F8_E4M3"))
