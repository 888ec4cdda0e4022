"""Closing objects narrows a schema and never contradicts it."""

import pytest

from halogen_core.server.closed_schemas import closed

NAME = {"type": "object", "properties": {"name": {"type": "string"}}}
CLOSED = NAME | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        (NAME, CLOSED),
        ({"type": "array", "items": NAME}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [NAME, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$ref": "#/$defs/n", "$defs": {"n": NAME}}, {"$ref": "#/$defs/n", "$defs": {"n": CLOSED}}),
        (
            {"type": "object", "properties": {"a": NAME}},
            {"type": "object", "properties": {"a": CLOSED}, "additionalProperties": False},
        ),
    ],
)  # fmt: skip
def test_objects_are_closed(schema, made):
    assert closed(schema) == made


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        NAME | {"additionalProperties": True},
        NAME | {"additionalProperties": {"type": "integer"}},
        NAME | {"patternProperties": {"^x": {}}},
        NAME | {"anyOf": [{"required": ["name"]}, {"required": ["other"]}]},
        NAME | {"oneOf": [NAME]},
        {"allOf": [NAME, {"properties": {"b": {}}}]},
        NAME | {"$ref": "#/$defs/n", "$defs": {"n": NAME}},
        {"type": "array", "items": {"if": NAME, "then": NAME}},
        {"const": {"properties": {"a": 1}}},
        {"enum": [NAME]},
    ],
)
def test_what_says_more_is_left_alone(schema):
    assert closed(schema) == schema


def test_a_property_may_be_called_like_a_keyword():
    schema = {"properties": {"properties": {"type": "string"}, "allOf": {"type": "integer"}}}
    assert closed(schema) == schema | {"additionalProperties": False}
