"""Random bodies: whatever is sent, the answer is an answer or a named refusal, never a 5xx."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halogen_core.server.openai_models import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

KINDS = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["", "user", "high", "\x00", "\ud800", "<|im_start|>", "{{ 7*7 }}", "🌍"])
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]) | anything},
        optional={
            "content": st.text(max_size=30) | anything,
            "name": anything,
            "tool_calls": anything,
        },
    ),
    max_size=4,
)


def bodies(kind):
    likely = {
        "messages": messages,
        "prompt": st.text(max_size=20) | st.lists(st.integers(0, 259), max_size=9),
        "tokens": st.lists(st.integers(-1, 300), max_size=9),
        "stream": st.booleans(),
        "max_tokens": st.integers(0, 20),
        "model": st.none() | st.just("scripted"),
    }
    fields = {name: likely.get(name, anything) | anything for name in kind.__struct_fields__}
    given_fields = st.lists(st.sampled_from(sorted(fields)), max_size=5, unique=True)
    required = [name for name in ("messages", "prompt", "tokens") if name in fields]
    return given_fields.flatmap(
        lambda names: st.fixed_dictionaries({n: fields[n] for n in {*names, *required[:1]}})
    )


@pytest.mark.parametrize("path", KINDS)
def test_random_bodies_never_break_the_server(hello, path):
    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies(KINDS[path]))
    def check(body):
        raw = json.dumps(body).encode()
        response = hello.post(path, raw)
        assert response.status_code < 500, (raw, response.text)
        if response.status_code != 200:
            error = response.json()["error"]
            assert error["hrt_code"].startswith("HRT-4"), (raw, error)
            assert error["message"]
        elif response.headers["content-type"].startswith("text/event-stream"):
            assert response.content.endswith(b"data: [DONE]\n\n")
            assert b'"error"' not in response.content, (raw, response.text)

    check()


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_cut_and_any_flipped_byte_of_a_body(hello, data):
    whole = b'{"messages": [{"role": "user", "content": "h\\u00e9 \xf0\x9f\x8c\x8d"}], "stop": ["a"], "n": 2}'
    raw = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for at in data.draw(st.lists(st.integers(0, max(0, len(raw) - 1)), max_size=3)):
        if raw:
            raw[at] ^= data.draw(st.integers(1, 255))
    response = hello.post("/v1/chat/completions", bytes(raw))
    assert response.status_code in (200, 400, 404)
