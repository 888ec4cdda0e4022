"""Tool calls through the real openai-python client; the scripted model writes what a family writes.

Tokens are bytes, so a stream is cut everywhere.
"""

import json

import openai
import pytest

from halogen_core.server.call_formats import Hermes, LlamaJson, Piece, ToolCall, call_format

HERMES = """{%- if tools %}<|im_start|>system
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}
Answer with <tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call><|im_end|>
{%- endif %}{%- for message in messages %}<|im_start|>{{ message.role }}:{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}</tool_call>
{%- endfor %}<|im_end|>{%- endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"""
LLAMA = "{% if tools %}<|python_tag|>{{ tools | tojson }}{% endif %}{{ messages[-1].content }}"
HI = [{"role": "user", "content": "Weather?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city", "parameters": PARAMETERS},
}
TIME = {"type": "function", "function": {"name": "time"}}
TWO = (
    'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


class Asker:
    """One server whose model writes `text`; an answer is the same streamed and whole."""

    def __init__(self, server):
        self.server, self.text = server, ""
        server.engine.script = lambda _request: list(self.text.encode())

    def __call__(self, text, **fields):
        self.text = text
        fields = {"model": "scripted", "messages": HI, "tools": [WEATHER, TIME]} | fields
        url = self.server.url + "/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(**fields).choices[0]
            with client.chat.completions.stream(**fields) as stream:
                for _ in stream:
                    pass
                streamed = stream.current_completion_snapshot.choices[0]
        assert summary(streamed) == summary(whole)
        return summary(whole)

    @property
    def request(self):
        return self.server.engine.requests[-1]


@pytest.fixture(scope="module")
def ask(serve):
    with serve("", template=HERMES) as server:
        yield Asker(server)


@pytest.fixture(scope="module")
def ask_llama(serve):
    with serve("", template=LLAMA) as server:
        yield Asker(server)


def summary(choice):
    calls = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    assert all(call.type == "function" for call in calls)
    found = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
    return choice.message.content or "", found, choice.finish_reason


def test_text_and_two_calls(ask):
    called = [("weather", {"city": "Köln"}), ("time", {})]
    assert ask(TWO) == ("Let me look.", called, "tool_calls")


@pytest.mark.parametrize(
    "text",
    [
        "No call.  \n",
        "1 < 2 and <tool",
        "<tool_call>not JSON</tool_call>",
        '<tool_call>{"name": 5}</tool_call> ',
        '<tool_call>{"name": "weather", "arguments": {"ci',
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
    ],
)
def test_what_is_no_call_stays_text(ask, text):
    assert ask(text) == (text, [], "stop")


def test_a_call_cut_before_its_end_tag_counts_when_it_is_whole(ask):
    text = '<tool_call>{"name": "time", "arguments": {}}'
    assert ask(text) == ("", [("time", {})], "tool_calls")


@pytest.mark.parametrize("cut", range(1, len(TWO.encode()), 19))
def test_cutting_at_max_tokens_never_fails(ask, cut):
    """llama.cpp#12379: no cut is an error, and what is shown plus what was called is all there."""
    text, calls, reason = ask(TWO, max_tokens=cut)
    assert reason == "length"
    assert text or calls or not TWO.encode()[:cut].decode("utf-8", "ignore").strip()


def test_llama_writes_calls_as_the_whole_answer(ask_llama):
    text = '{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "time", "parameters": {}}'
    called = [("weather", {"city": "Rome"}), ("time", {})]
    assert ask_llama(text) == ("", called, "tool_calls")
    assert ask_llama('{"answer": 5}') == ('{"answer": 5}', [], "stop")
    assert ask_llama("Say {}") == ("Say {}", [], "stop")


def test_the_template_sees_the_tools_and_earlier_calls(ask):
    call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    history = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]  # fmt: skip
    ask("It rains.", messages=history)
    prompt = bytes(t for t in ask.request.prompt_token_ids if t < 256).decode()
    assert '"name": "weather", "description": "Of a city"' in prompt
    assert "<tool_call>Oslo</tool_call>" in prompt
    assert "tool:rain" in prompt


@pytest.mark.parametrize(
    ("fields", "constrained"),
    [
        ({}, False),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "time"}}}, True),
        ({"parallel_tool_calls": False}, True),
        ({"tools": [WEATHER | {"function": WEATHER["function"] | {"strict": True}}]}, True),
    ],
)
def test_when_calls_are_enforced(ask, fields, constrained):
    ask("x", **fields)
    assert bool(ask.request.grammar) == constrained


def test_no_tools_are_rendered_when_none_may_be_called(ask):
    assert ask("<tool_call>", tool_choice="none") == ("<tool_call>", [], "stop")
    assert "weather" not in bytes(t for t in ask.request.prompt_token_ids if t < 256).decode()


@pytest.mark.parametrize(
    ("template", "fields", "message"),
    [
        (HERMES, {"tool_choice": "required", "tools": []}, "`tools` are not given"),
        (
            HERMES,
            {"tool_choice": {"type": "function", "function": {"name": "tim"}}},
            "`weather`, `time`",
        ),
        (HERMES, {"response_format": {"type": "json_object"}}, "beside a form"),
        (HERMES, {"functions": [{"name": "f"}]}, "`functions` is not supported"),
        ("{{ messages }}", {}, "no place for `tools`"),
        ("{{ tools }}[TOOL_CALLS]", {}, "known are Hermes and Llama"),
        (HERMES, {"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "{"}}]}]}, "no JSON"),
    ],
)  # fmt: skip
def test_refusals(serve, template, fields, message):
    with serve("x", template=template) as server:
        body = {"messages": HI, "tools": [WEATHER, TIME]} | fields
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


def test_formats_show_in_templates():
    assert isinstance(call_format(HERMES), Hermes)
    assert isinstance(call_format(LLAMA), LlamaJson)
    assert call_format("<tool_call><function=name> arguments") is None
    assert call_format("{{ messages }}") is None


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 1000])
def test_reading_does_not_depend_on_the_cuts(size):
    reader = Hermes().reader()
    pieces = [reader.push(TWO[at : at + size]) for at in range(0, len(TWO), size)]
    pieces.append(reader.finish())
    assert "".join(piece.text for piece in pieces) == "Let me look."
    calls = sum((piece.calls for piece in pieces), ())
    assert calls == (ToolCall("weather", '{"city": "Köln"}'), ToolCall("time", "{}"))
    assert reader.finish() == Piece()
