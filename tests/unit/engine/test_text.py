"""Stop strings and incremental UTF-8: what streams is what a whole answer says."""

from hypothesis import given
from hypothesis import strategies as st

from halogen_core.engine.protocol import TokenOutput
from halogen_core.engine.text import StopMatcher, TextStream


class Bytes:
    """Token n is byte n; 256 is a control token."""

    def token_bytes(self, token_id):
        return bytes([token_id]) if token_id < 256 else b"<|end|>"

    def is_control(self, token_id):
        return token_id >= 256


def outputs(data, sizes, reason="length"):
    tokens, at = list(data), 0
    for size in [*sizes, len(tokens)]:
        last = at + size >= len(tokens)
        yield TokenOutput(
            request_id="r", token_ids=tokens[at : at + size], finish_reason=reason if last else None
        )
        at += size
        if last:
            return


def run(data, sizes, stop=()):
    stream = TextStream(Bytes(), stop)
    deltas = []
    for output in outputs(data, sizes):
        deltas.append(stream.push(output))
        if deltas[-1].finish_reason:
            break
    return deltas


TEXTS = st.text(alphabet="abc日本👩‍💻é ไทย\n", max_size=24)


@given(text=TEXTS, sizes=st.lists(st.integers(1, 4), max_size=30))
def test_deltas_join_to_the_text_however_it_is_cut(text, sizes):
    deltas = run(text.encode(), sizes)
    assert "".join(d.text for d in deltas) == text
    assert [d.finish_reason for d in deltas].count("length") == 1


@given(
    text=st.text(alphabet="ab ", max_size=20),
    stops=st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 4), max_size=30),
)
def test_stops_cut_at_the_same_place_however_tokens_fall(text, stops, sizes):
    whole = "".join(d.text for d in run(text.encode(), [1] * 30, stops))
    assert "".join(d.text for d in run(text.encode(), sizes, stops)) == whole
    assert text.startswith(whole)
    assert not any(s in whole for s in stops)
    if not any(s in text for s in stops):
        assert whole == text


def test_no_part_of_a_stop_leaks():
    for cut in range(1, 8):
        deltas = run(b"hello DEFGHIJ more", [6 + cut, 7 - cut or 1] + [1] * 20, ["DEFGHIJ"])
        assert "".join(d.text for d in deltas) == "hello "
        assert deltas[-1].finish_reason == "stop"
        assert deltas[-1].stop_reason == "DEFGHIJ"


def test_what_was_held_back_is_given_at_the_end():
    deltas = run(b"really?", [1] * 10, ["?\n"])
    assert "".join(d.text for d in deltas) == "really?"


def test_tokens_after_the_stop_are_not_counted():
    delta = run(b"one.two", [7], ["."])[-1]
    assert bytes(delta.token_ids) == b"one."
    assert delta.text == "one"


def test_control_tokens_show_nothing_and_bad_bytes_show_once():
    stream = TextStream(Bytes())
    delta = stream.push(TokenOutput(request_id="r", token_ids=[65, 256, 66], finish_reason="stop"))
    assert delta.text == "AB"
    deltas = run("é".encode()[:1], [1])
    assert "".join(d.text for d in deltas) == "\ufffd"


def test_the_longest_of_stops_complete_together_wins():
    assert StopMatcher(("ab", "aab")).push("xaab") == ("x", "aab")
