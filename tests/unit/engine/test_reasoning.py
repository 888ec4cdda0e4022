"""Thoughts are parted from the answer the same way however the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halogen_core.engine.reasoning import Part, ReasoningSplitter

PIECES = ["<think>", "</think>", "<", "a", " ", "\n", "</"]


def split(text, sizes=(), part=Part.START):
    splitter, at, found = ReasoningSplitter(part), 0, []
    for size in [*sizes, len(text)]:
        found.append(splitter.push(text[at : at + size]))
        at += size
    found.append(splitter.finish())
    return "".join(t for t, _ in found), "".join(a for _, a in found)


@pytest.mark.parametrize(
    ("text", "parted"),
    [
        ("<think>\nHm. \n</think>\n\nYes.", ("Hm.", "Yes.")),
        ("<think>\n\n</think>\n\nYes.", ("", "Yes.")),
        (" \n<think>a</think>b\n", ("a", "b\n")),
        ("<think>a < b </thin </think>  b", ("a < b </thin", "  b")),
        ("<think>cut", ("cut", "")),
        ("<think>cut </thi", ("cut </thi", "")),
        ("<think>done</think>\n\n", ("done", "")),
        ("No thoughts, <think>only</think> text", ("", "No thoughts, <think>only</think> text")),
        ("<thi", ("", "<thi")),
        ("\n", ("", "\n")),
        ("", ("", "")),
    ],
)
def test_parts(text, parted):
    assert split(text) == parted
    assert split(text, [1] * len(text)) == parted


def test_a_prompt_may_have_opened_the_tag():
    assert split("so\n</think>\nYes", part=Part.THOUGHTS) == ("so", "Yes")


@given(
    text=st.lists(st.sampled_from(PIECES), max_size=16).map("".join),
    sizes=st.lists(st.integers(1, 5), max_size=40),
    part=st.sampled_from([Part.START, Part.THOUGHTS]),
)
def test_cuts_do_not_matter(text, sizes, part):
    assert split(text, sizes, part) == split(text, part=part)


@given(text=st.text(alphabet="ab <>/\n", max_size=20))
def test_an_answer_without_the_tag_is_not_changed(text):
    assert split(text) == ("", text)
