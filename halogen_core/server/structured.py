"""From what a body asks of its answer's form to the grammar that the engine enforces.

OpenAI's `response_format`, vLLM's `guided_*` and `structured_outputs`, llama.cpp's `grammar` and
`json_schema` say the same things in four ways. What cannot be enforced is refused, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import attrs
import msgspec

from halogen_core.engine.grammar_trial import Asked
from halogen_core.errors import Overloaded, RequestError
from halogen_core.server.closed_schemas import closed
from halogen_core.server.openai_models import (
    GenerationBody,
    ResponseFormat,
    Schema,
    StructuredOutputs,
)
from halogen_core.server.service import Service

MAX_SOURCE_CHARS = 256 * 1024
WHITESPACE = r"\n?[ \t]{0,24}"
"""Between JSON tokens: models indent, but some would never stop (vllm#13260)."""
JSON_OPTIONS: Any = {"whitespace_pattern": WHITESPACE}


@attrs.frozen
class Form:
    """The grammar that an answer must match, and the field that asks for it."""

    grammar: Asked
    param: str


def answer_form(body: GenerationBody) -> Form | None:
    """The form that a body asks for, not compiled yet; None: free text. Raises `RequestError`."""
    forms = [Form(grammar, name) for name, grammar in _grammars(body) if grammar is not None]
    if len(forms) > 1:
        first, second, *_ = (form.param for form in forms)
        raise _refused(f"`{first}` and `{second}` both say what it is; send one", second)
    return forms[0] if forms else None


async def tried(service: Service, form: Form | None) -> str:
    """The grammar of a form, compiled once to be sure; empty: free text.

    Raises `RequestError` (HRT-4009) for one that is too large, too slow or none.
    """
    if form is None:
        return ""
    _refuse_long(form.grammar.text, form.param)
    try:
        trial = await service.trials.check(form.grammar)
    except Overloaded:
        raise
    except RequestError as exc:
        raise RequestError(exc.message, param=form.param, code=exc.code) from None
    service.metrics.grammar.observe(trial.seconds)
    return trial.source


def json_grammar(schema: str | Schema, param: str) -> Asked:
    """JSON that matches a schema; raises `RequestError` (HRT-4009)."""
    import llguidance

    try:
        written = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
        _refuse_long(written, param)
        parsed = msgspec.json.decode(written, type=Schema)
        text = msgspec.json.encode(closed(parsed)).decode()
        source = llguidance.LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
    except (ValueError, msgspec.DecodeError, RecursionError) as exc:
        raise _refused(f"the JSON schema does not read: {exc}", param) from None
    return Asked(source)


def _grammars(body: GenerationBody) -> Iterator[tuple[str, Asked | None]]:
    """Every field that can ask for a form, with its grammar or nothing."""
    yield "response_format", _response_format(body.response_format)
    yield "structured_outputs", _structured_outputs(body.structured_outputs)
    yield "guided_json", _json(body.guided_json, "guided_json")
    yield "json_schema", _json(body.json_schema, "json_schema")
    yield "guided_regex", _regex(body.guided_regex)
    yield "guided_choice", _choice(body.guided_choice, "guided_choice")
    yield "guided_grammar", _grammar(body.guided_grammar)
    yield "grammar", _grammar(body.grammar)


def _response_format(asked: ResponseFormat | None) -> Asked | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return json_grammar(asked.schema or {"type": "object"}, "response_format")
    if asked.json_schema is None or asked.json_schema.schema is None:
        raise RequestError(
            "`response_format` of type `json_schema` needs `json_schema.schema`",
            param="response_format",
        )
    return json_grammar(asked.json_schema.schema, "response_format")


def _structured_outputs(asked: StructuredOutputs | None) -> Asked | None:
    if asked is None:
        return None
    if asked.structural_tag is not None:
        raise RequestError(
            "`structured_outputs.structural_tag` is not supported by this version",
            param="structured_outputs",
            code="HRT-4008",
            fix="use `json`, `regex`, `choice` or `grammar`",
        )
    name = "structured_outputs"
    grammars = [
        _json({"type": "object"} if asked.json_object else None, name),
        _json(asked.json, name),
        _regex(asked.regex),
        _choice(asked.choice, name),
        _grammar(asked.grammar),
    ]
    given = [grammar for grammar in grammars if grammar is not None]
    if len(given) != 1:
        raise _refused(f"`{name}` must hold one form, it holds {len(given)}", name)
    return given[0]


def _json(schema: str | Schema | None, param: str) -> Asked | None:
    return json_grammar(schema, param) if schema is not None else None


def _regex(pattern: str | None) -> Asked | None:
    if not pattern:
        return None
    import llguidance

    return Asked(llguidance.LLMatcher.grammar_from_regex(pattern))


def _choice(options: list[str] | None, param: str) -> Asked | None:
    if options is None:
        return None
    if not options or "" in options:
        raise _refused("a choice needs at least one text, and none that is empty", param)
    # one terminal: as alternatives of a rule, some thousands are more than the parser takes
    texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in options)
    return lark_grammar(f"start: CHOICE\nCHOICE: {texts}")


def _grammar(text: str | None) -> Asked | None:
    """Lark as llguidance writes it, or llama.cpp's GBNF."""
    return Asked(text, written=True) if text else None


def lark_grammar(text: str) -> Asked:
    """Lark rules as a grammar."""
    import llguidance

    return Asked(llguidance.LLMatcher.grammar_from_lark(text))


def _refuse_long(text: str, param: str) -> None:
    if len(text) > MAX_SOURCE_CHARS:
        raise _refused(f"it has {len(text)} characters, at most {MAX_SOURCE_CHARS} may be", param)


def _refused(what: str, param: str) -> RequestError:
    return RequestError(f"the grammar is refused: {what}", param=param, code="HRT-4009")
