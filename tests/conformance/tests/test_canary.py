"""The canary model sees a foreign token, and nothing else disturbs it."""

import attrs
import numpy as np
import pytest

from halogen_conformance.case import Failure
from halogen_conformance.oracle.decoder import OracleDecoder
from halogen_conformance.oracle.numbers import Arithmetic
from halogen_conformance.oracle.operations import log_softmax
from halogen_conformance.served import LOGPROB_SLACK, Ask, Server
from halogen_conformance.serving_canary import _hparams, alphabet, prompt, tensors
from halogen_core.spi.testing import MemoryCheckpoint, f32_tensor

VOCAB = 258


def decoder(dtype="f64", kv_dtype=""):
    checkpoint = MemoryCheckpoint(
        architecture="llama",
        hparams=_hparams(1024, VOCAB),
        tensors={name: f32_tensor(name, values) for name, values in tensors(VOCAB).items()},
    )
    return OracleDecoder(checkpoint=checkpoint, a=Arithmetic(dtype), kv_dtype=kv_dtype)


def best(tokens, **how):
    """Token and log-probability that follow."""
    row = log_softmax(decoder(**how).logits(np.array(tokens))[-1])
    return int(row.argmax()), float(row.max())


RNG = np.random.default_rng(0)
PURE = best(prompt(3, 10, RNG))[1]


@pytest.mark.parametrize("length", [1, 7, 60, 300])
@pytest.mark.parametrize("colour", range(8))
def test_one_colour_goes_on_with_one_probability(colour, length):
    token, logprob = best(prompt(colour, length, RNG))
    assert token in alphabet(colour)
    assert abs(logprob - PURE) < LOGPROB_SLACK / 3


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("f16", "f16"), ("bf16", "bf16"), ("f32", "q8_0")])
def test_narrow_dtypes_stay_within_the_slack(dtype, kv_dtype):
    expected = best(prompt(2, 20, RNG), dtype=dtype, kv_dtype=kv_dtype)[1]
    for length in (1, 33, 200):
        _, logprob = best(prompt(2, length, RNG), dtype=dtype, kv_dtype=kv_dtype)
        assert abs(logprob - expected) < LOGPROB_SLACK


@pytest.mark.parametrize("length", [4, 16, 30, 60, 100])
def test_one_foreign_token_shows(length):
    tokens = prompt(3, length, RNG)
    tokens[length // 2] = alphabet(6)[0]
    token, logprob = best(tokens)
    assert token not in alphabet(3) or abs(logprob - PURE) > LOGPROB_SLACK


def test_the_check_of_an_answer_can_fail():
    server = Server.__new__(Server)
    server.expected = -1.0
    ask = Ask(colour=1, length=5, tokens=2)
    good = chr(alphabet(1)[0]) * 2
    server.check_text(ask, good, [-1.0, -1.1])
    for text, logprobs in ((good, [-1.0, -3.0]), ("~~", [-1, -1]), (good[:1], [-1.0])):
        with pytest.raises(Failure):
            server.check_text(ask, text, logprobs)
    with pytest.raises(Failure):
        server.check_text(attrs.evolve(ask, colour=2), good, [-1.0, -1.0])
