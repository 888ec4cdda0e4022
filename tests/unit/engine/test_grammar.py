"""Compiled grammars: kept, bounded, and never silently without effect."""

import string

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from halogen_core.engine import grammar
from halogen_core.engine.grammar import Grammars
from halogen_core.engine.protocol import SamplingParams
from halogen_core.engine.sampler import RowSampler, SamplingRow, sampling_batch
from halogen_core.errors import RequestError
from halogen_core.loader import Tokenizer
from halogen_core.loader.tokenizer import TokenKind

LETTERS = list(string.ascii_lowercase + string.digits + " ")
END = len(LETTERS)
VOCAB = 70
"""Of the model: more than the tokenizer knows, over a word of the mask."""


def tokenizer(ends=(END,)):
    pieces = [*LETTERS, "<end>"]
    core = tokenizers.Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(LETTERS)}, merges=[]))
    return Tokenizer(
        build=lambda: core,
        pieces=[p.replace(" ", "▁") for p in pieces],
        kinds=[TokenKind.NORMAL] * len(LETTERS) + [TokenKind.CONTROL],
        byte_level=False,
        end_token_ids=frozenset(ends),
    )


def lark(rule):
    return f"start: {rule}"


def allowed(answer):
    row = np.full(answer.mask_words, 0xFFFFFFFF, np.uint32)
    answer.allow(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB]
    return "".join([*LETTERS, "$", *"?" * 40][i] for i in np.flatnonzero(bits))


@pytest.fixture
def grammars():
    return Grammars(tokenizer, VOCAB)


def test_an_answer_is_led_to_its_end(grammars):
    answer = grammars.start(lark('"ab" | "ac" "1"*'))
    assert allowed(answer) == "a"
    answer.record(LETTERS.index("a"), ends=False)
    assert allowed(answer) == "bc"
    assert not answer.complete
    answer.record(LETTERS.index("c"), ends=False)
    assert allowed(answer) == "1$"
    answer.record(END, ends=True)
    assert answer.complete
    assert not answer.error


def test_answers_do_not_share_their_way(grammars):
    first, second = (grammars.start(lark('"a" "b"')) for _ in range(2))
    first.record(LETTERS.index("a"), ends=False)
    assert allowed(first) == "b"
    assert allowed(second) == "a"


def test_a_forbidden_token_and_an_early_end_are_errors(grammars):
    answer = grammars.start(lark('"ab"'))
    answer.record(LETTERS.index("z"), ends=False)
    assert answer.error
    answer = grammars.start(lark('"ab"'))
    answer.record(END, ends=True)
    assert "no way to finish" in answer.error


@pytest.mark.parametrize("source", ["", "start: nope", 'start: "A"', "start: start"])
def test_what_is_no_grammar_is_refused(grammars, source):
    """An upper-case letter is not in this vocabulary, so nothing matches."""
    for _ in range(2):
        with pytest.raises(RequestError) as error:
            grammars.check(source)
        assert error.value.code == "HRT-4009"


@pytest.mark.parametrize("source", ['start: "A"', "start: start", "start: a\na: b\nb: a"])
def test_a_grammar_without_an_answer_is_told_in_words(grammars, source):
    with pytest.raises(RequestError, match="it matches no text"):
        grammars.check(source)


def test_an_ambiguous_grammar_cannot_keep_a_step_for_long(grammars, monkeypatch):
    """Every token costs more than the one before it: here each way to pair what is there."""
    monkeypatch.setattr(grammar, "SLOW_S", 0.002)
    answer = grammars.start(lark('s\ns: s s | "a" | "aa"'))
    letter, tokens = LETTERS.index("a"), 0
    while not answer.error and tokens < 2000:
        allowed(answer)
        answer.record(letter, ends=False)
        tokens += 1
    assert "too ambiguous" in answer.error
    plain = grammars.start(lark("/a+/"))
    for _ in range(tokens):
        allowed(plain)
        plain.record(letter, ends=False)
    assert not plain.error


def test_a_model_without_an_end_cannot_follow_one():
    with pytest.raises(RequestError, match="no end token"):
        Grammars(lambda: tokenizer(ends=()), VOCAB).check(lark('"a"'))


def test_the_ones_used_last_are_kept(grammars, monkeypatch):
    monkeypatch.setattr(grammar, "KEPT", 2)
    compiled = []
    new = grammar.compile_grammar
    monkeypatch.setattr(
        grammar, "compile_grammar", lambda words, s: compiled.append(s) or new(words, s)
    )
    for rule in ('"a"', '"b"', '"a"', '"c"', '"a"', '"b"'):
        grammars.check(lark(rule))
    assert compiled == [lark(rule) for rule in ('"a"', '"b"', '"c"', '"b"')]


def test_rows_without_a_grammar_may_say_anything(grammars):
    def row(answer, forced=-1):
        return SamplingRow(
            RowSampler.start(SamplingParams(), [1], seed=1, grammar=answer), 3, forced
        )

    assert sampling_batch([row(None)]).mask is None
    ruled = grammars.start(lark('"a"'))
    mask = sampling_batch([row(None), row(ruled), row(ruled, forced=5)]).mask
    assert mask.shape == (3, 3)
    assert (mask[[0, 2]] == 0xFFFFFFFF).all()
    assert mask[1].tolist() == [1, 0, 0]
