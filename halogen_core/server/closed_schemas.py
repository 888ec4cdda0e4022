"""Objects that say which properties they have get no others.

JSON Schema allows any further property unless `additionalProperties` forbids it, and small models
then go on inventing some. Who writes `properties` rarely means that; whoever does can say so. What
is made here is narrower than what was asked for, so every answer still matches the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NESTED = ("properties", "$defs", "definitions")
"""Keywords whose values are schemas by name."""
SINGLE = ("items", "additionalProperties")
LISTED = ("anyOf", "oneOf", "prefixItems")
OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "anyOf", "oneOf")
"""Keywords with which an object says itself what else it may have."""
MERGING = ("allOf", "if", "not", "dependentSchemas")
"""Keywords by which several schemas speak of one object; closing one would contradict another."""


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` with every object closed that names its properties; unchanged if schemas merge."""
    try:
        merged = any(_merges(node) for node in _nodes(schema))
        return schema if merged else _closed(schema)
    except RecursionError:
        return schema  # llguidance refuses what is nested so deeply, with a reason


def _merges(node: dict[str, Any]) -> bool:
    return any(word in node for word in MERGING) or ("$ref" in node and "properties" in node)


def _closed(node: dict[str, Any]) -> dict[str, Any]:
    shared = "properties" in node and ("anyOf" in node or "oneOf" in node)
    made = {word: _within(word, value, shared=shared) for word, value in node.items()}
    if isinstance(node.get("properties"), dict) and not any(word in node for word in OPEN):
        made["additionalProperties"] = False
    return made


def _within(word: str, value: Any, *, shared: bool) -> Any:
    """The value of a keyword with the schemas in it closed."""
    if word in NESTED and isinstance(value, dict):
        return {name: _each(child) for name, child in value.items()}
    if word in LISTED and isinstance(value, list) and not shared:
        return [_each(child) for child in value]
    return _each(value) if word in SINGLE else value


def _each(value: Any) -> Any:
    return _closed(value) if isinstance(value, dict) else value


def _nodes(node: Any) -> Iterator[dict[str, Any]]:
    """Every schema within a schema, itself first."""
    if not isinstance(node, dict):
        return
    yield node
    for word, value in node.items():
        if word in NESTED and isinstance(value, dict):
            children = list(value.values())
        elif word in LISTED and isinstance(value, list):
            children = value
        else:
            children = [value] if word in SINGLE else []
        for child in children:
            yield from _nodes(child)
