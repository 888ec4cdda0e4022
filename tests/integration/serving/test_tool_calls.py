"""Calls that are asked for are made, even by a model that knows nothing."""

import json

import jsonschema
import pytest

SPOT = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/digit"}, "y": {"$ref": "#/$defs/digit"}},
    "required": ["x", "y"],
    "additionalProperties": False,
    "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
}
COLOUR = {
    "type": "object",
    "properties": {"name": {"enum": ["rot", "grün"]}},
    "required": ["name"],
    "additionalProperties": False,
}
SCHEMAS = {"move": SPOT, "paint": COLOUR, "stop": {"type": "object", "maxProperties": 0}}
TOOLS = [
    {"type": "function", "function": {"name": "move", "parameters": SPOT}},
    {"type": "function", "function": {"name": "paint", "parameters": COLOUR}},
    {"type": "function", "function": {"name": "stop"}},
]


def calls_of(tool_server, **fields):
    body = {"tools": TOOLS, "temperature": 1.5, "max_tokens": 300} | fields
    answer = tool_server.chat(**body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    calls = choice["message"].get("tool_calls", [])
    for call in calls:
        function = call["function"]
        jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
    return choice, [call["function"]["name"] for call in calls]


@pytest.mark.parametrize("seed", range(4))
def test_required_calls_are_made_and_valid(tool_server, seed):
    choice, names = calls_of(tool_server, seed=seed, tool_choice="required")
    assert names
    assert choice["finish_reason"] in ("tool_calls", "length")
    assert choice["message"]["content"] is None


def test_one_named_call(tool_server):
    choice = {"type": "function", "function": {"name": "move"}}
    for seed in range(3):
        fields = {"tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
        answer, names = calls_of(tool_server, **fields)
        assert names == ["move"]
        assert answer["finish_reason"] == "tool_calls"


def test_auto_leaves_the_model_free(tool_server):
    strict = [tool | {"function": tool["function"] | {"strict": True}} for tool in TOOLS]
    for tools in (TOOLS, strict):
        choice, names = calls_of(tool_server, tools=tools, max_tokens=20)
        assert names == []
        assert choice["message"]["content"]
