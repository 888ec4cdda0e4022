"""From what a body asks of its answer's form to the grammar that the engine enforces.

OpenAI's `response_format`, vLLM's `guided_*` and `structured_outputs`, llama.cpp's `grammar` and
`json_schema` say the same things in four ways. What cannot be enforced is refused, never ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from halogen_core.errors import RequestError
from halogen_core.server.closed_schemas import closed
from halogen_core.server.openai_models import (
    GenerationBody,
    ResponseFormat,
    Schema,
    StructuredOutputs,
)
from halogen_core.server.service import Service

MAX_SOURCE_CHARS = 256 * 1024
MAX_COMPILE_S = 2.0
WHITESPACE = r"\n?[ \t]{0,24}"
"""Between JSON tokens: models indent, but some would never stop (vllm#13260)."""
JSON_OPTIONS: Any = {"whitespace_pattern": WHITESPACE}


def answer_grammar(service: Service, body: GenerationBody) -> str:
    """The grammar a body asks for, compiled once to be sure; empty: free text.

    Runs in a worker thread. Raises `RequestError`, HRT-4009 for what does not compile.
    """
    sources = {name: source for name, source in _sources(body) if source}
    if len(sources) > 1:
        first, second, *_ = sources
        raise _refused(f"`{first}` and `{second}` both say what it is; send one", second)
    for param, source in sources.items():
        check_grammar(service, source, param)
    return next(iter(sources.values()), "")


def check_grammar(service: Service, source: str, param: str) -> None:
    """Raise `RequestError` (HRT-4009) for a grammar that is too large, too slow or none."""
    if len(source) > MAX_SOURCE_CHARS:
        raise _refused(f"it has {len(source)} characters, at most {MAX_SOURCE_CHARS} may be", param)
    began = time.thread_time()
    try:
        service.grammars.check(source)
    except RequestError as exc:
        raise RequestError(exc.message, param=param, code=exc.code) from None
    took = time.thread_time() - began
    service.metrics.grammar.observe(took)
    if took > MAX_COMPILE_S:
        raise _refused(f"it took {took:.1f} s to compile, {MAX_COMPILE_S:g} s are allowed", param)


def json_grammar(schema: str | Schema, param: str) -> str:
    """JSON that matches a schema; raises `RequestError` (HRT-4009)."""
    import llguidance

    try:
        parsed = msgspec.json.decode(schema, type=Schema) if isinstance(schema, str) else schema
        text = msgspec.json.encode(closed(parsed)).decode()
        return llguidance.LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
    except (ValueError, msgspec.DecodeError, RecursionError) as exc:
        raise _refused(f"the JSON schema does not read: {exc}", param) from None


def _sources(body: GenerationBody) -> Iterator[tuple[str, str]]:
    """Every field that can ask for a form, with its grammar or nothing."""
    yield "response_format", _response_format(body.response_format)
    yield "structured_outputs", _structured_outputs(body.structured_outputs)
    yield "guided_json", _json(body.guided_json, "guided_json")
    yield "json_schema", _json(body.json_schema, "json_schema")
    yield "guided_regex", _regex(body.guided_regex)
    yield "guided_choice", _choice(body.guided_choice, "guided_choice")
    yield "guided_grammar", _grammar(body.guided_grammar, "guided_grammar")
    yield "grammar", _grammar(body.grammar, "grammar")


def _response_format(asked: ResponseFormat | None) -> str:
    if asked is None or asked.type == "text":
        return ""
    if asked.type == "json_object":
        return json_grammar(asked.schema or {"type": "object"}, "response_format")
    if asked.json_schema is None or asked.json_schema.schema is None:
        raise RequestError(
            "`response_format` of type `json_schema` needs `json_schema.schema`",
            param="response_format",
        )
    return json_grammar(asked.json_schema.schema, "response_format")


def _structured_outputs(asked: StructuredOutputs | None) -> str:
    if asked is None:
        return ""
    if asked.structural_tag is not None:
        raise RequestError(
            "`structured_outputs.structural_tag` is not supported by this version",
            param="structured_outputs",
            code="HRT-4008",
            fix="use `json`, `regex`, `choice` or `grammar`",
        )
    name = "structured_outputs"
    sources = [
        _json({"type": "object"} if asked.json_object else None, name),
        _json(asked.json, name),
        _regex(asked.regex),
        _choice(asked.choice, name),
        _grammar(asked.grammar, name),
    ]
    given = [source for source in sources if source]
    if len(given) != 1:
        raise _refused(f"`{name}` must hold one form, it holds {len(given)}", name)
    return given[0]


def _json(schema: str | Schema | None, param: str) -> str:
    return json_grammar(schema, param) if schema is not None else ""


def _regex(pattern: str | None) -> str:
    if not pattern:
        return ""
    import llguidance

    return llguidance.LLMatcher.grammar_from_regex(pattern)


def _choice(options: list[str] | None, param: str) -> str:
    if options is None:
        return ""
    if not options or "" in options:
        raise _refused("a choice needs at least one text, and none that is empty", param)
    # one terminal: as alternatives of a rule, some thousands are more than the parser takes
    texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in options)
    return lark_grammar(f"start: CHOICE\nCHOICE: {texts}")


def _grammar(text: str | None, param: str) -> str:
    """Lark as llguidance writes it, or llama.cpp's GBNF."""
    from llguidance.gbnf_to_lark import any_to_lark

    if not text:
        return ""
    try:
        return lark_grammar(any_to_lark(text))
    except RecursionError:
        raise _refused("it is nested too deeply", param) from None
    except Exception as exc:
        # the converter raises bare Exceptions
        raise _refused(f"it is neither Lark nor GBNF: {str(exc)[:200]}", param) from None


def lark_grammar(text: str) -> str:
    """Lark rules as a grammar."""
    import llguidance

    return llguidance.LLMatcher.grammar_from_lark(text)


def _refused(what: str, param: str) -> RequestError:
    return RequestError(f"the grammar is refused: {what}", param=param, code="HRT-4009")
