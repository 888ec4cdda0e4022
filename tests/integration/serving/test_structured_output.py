"""Structured answers of a model that knows nothing: whatever is valid was enforced."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pydantic
import pytest

HI = [{"role": "user", "content": "Say hello."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", "🙂"]}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]},
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
    "$defs": {"leaf": {"type": "object", "properties": {}, "additionalProperties": False}},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def served(tool_server):
    return tool_server


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def answer(served, **fields):
    return served.chat(**{"temperature": 1.5, "max_tokens": 400} | fields).json()["choices"][0]


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_matches_its_schema(served, seed):
    choice = answer(served, seed=seed, response_format=FORMAT)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_free_and_structured_answers_share_steps(served):
    """Neither changes the other: each is what it is alone."""
    asked = [
        {"seed": n} | ({"response_format": FORMAT} if n % 2 else {"max_tokens": 40})
        for n in range(4)
    ]
    alone = [answer(served, **fields) for fields in asked]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda fields: answer(served, **fields), asked))
    assert together == alone


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, r"[a-c]{3}-[0-9]{2}"),
        ({"structured_outputs": {"regex": "x{2,5}"}}, r"x{2,5}"),
        ({"guided_choice": ["yes", "no", 'mäh "b"\n']}, r'yes|no|mäh "b"\n'),
        ({"structured_outputs": {"choice": ["left", "right"]}}, r"left|right"),
        ({"grammar": 'root ::= "<" [a-z] [a-z] ">"'}, r"<[a-z]{2}>"),
        ({"guided_grammar": 'start: "(" /[01]{4}/ ")"'}, r"\([01]{4}\)"),
        ({"json_schema": {"const": 7}}, r"7"),
        ({"guided_json": '{"enum": [true, null]}'}, r"true|null"),
    ],
    ids=str,
)
def test_every_way_to_say_it(served, fields, pattern):
    choice = answer(served, **fields)
    assert re.fullmatch(pattern, choice["message"]["content"])
    assert choice["finish_reason"] == "stop"


def test_choices_may_be_thousands(served):
    """As many alternatives of a rule are more than the parser takes."""
    options = [f"label {i}" for i in range(5000)]
    choice = answer(served, guided_choice=options)
    assert choice["message"]["content"] in options
    assert choice["finish_reason"] == "stop"


def test_json_objects_end_without_endless_whitespace(served):
    """Cut at `max_tokens`, or whole; the text before is JSON so far (vllm#13260)."""
    choice = answer(served, response_format={"type": "json_object"}, seed=1)
    text = choice["message"]["content"]
    assert text.lstrip().startswith("{")
    assert not re.search(r"\s{27}", re.sub(r'"(\\.|[^"\\])*"', '""', text))


def test_streams_and_choices_and_text_completions(client, served):
    stream = client.chat.completions.create(
        model="tiny-tools", messages=HI, stream=True, n=3, seed=5, max_tokens=300,
        response_format=FORMAT,
    )  # fmt: skip
    texts = ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    body = {"prompt": ["a", "b"], "guided_choice": ["ja", "nein"], "max_tokens": 9}
    choices = served.client.post("/v1/completions", json=body).json()["choices"]
    assert {c["text"] for c in choices} <= {"ja", "nein"}
    assert len(choices) == 2


class Person(pydantic.BaseModel):
    kind: str = pydantic.Field(pattern="^(cat|dog)$")
    legs: int = pydantic.Field(ge=0, le=9)


def test_the_openai_client_parses_into_a_class(client):
    parsed = client.chat.completions.parse(
        model="tiny-tools", messages=HI, response_format=Person, temperature=1, max_tokens=100
    )
    assert parsed.choices[0].message.parsed.kind in ("cat", "dog")


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE = {
    "unknown type": {"json_schema": {"type": "banana"}},
    "keyword that cannot be enforced": {"json_schema": {"type": "array", "uniqueItems": True}},
    "unknown format": {"json_schema": {"type": "string", "format": "klingon"}},
    "cycle": {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "remote reference": {"json_schema": {"$ref": "http://169.254.169.254/x"}},
    "deep": {"json_schema": nested(300)},
    "large": {"json_schema": {"enum": ["x" * 300_000]}},
    "cut": {"guided_json": '{"type": "inte'},
    "broken regex": {"guided_regex": "((("},
    "deep regex": {"guided_regex": "(" * 10_000 + "a" + ")" * 10_000},
    "missing rule": {"grammar": 'root ::= "a" | nope'},
    "no grammar": {"guided_grammar": "%%%"},
    "deep grammar": {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    "no choice": {"guided_choice": []},
    "two at once": {"guided_regex": "a", "grammar": 'root ::= "a"'},
    "nothing": {"structured_outputs": {}},
    "no schema": {"response_format": {"type": "json_schema"}},
    "unknown form": {"response_format": {"type": "xml"}},
    "tag": {"structured_outputs": {"structural_tag": {}}},
}


@pytest.mark.parametrize("fields", HOSTILE.values(), ids=HOSTILE)
def test_what_cannot_be_enforced_is_refused(served, fields):
    """Never a 200 with free text (llama.cpp#19051), and the server lives on."""
    began = served.status()["engine"]
    response = served.chat(**fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["hrt_code"] in ("HRT-4001", "HRT-4006", "HRT-4008", "HRT-4009")
    assert error["type"] == "invalid_request_error"
    assert served.status()["engine"]["placement"] == began["placement"]


@pytest.mark.parametrize("pattern", ["foo**", "(a+)+$", "a{1,1000000}", "(.*a.{20}){5}"])
def test_hard_patterns_do_not_hurt_others(served, pattern):
    """vllm#17313: they are enforced or refused, and the next request is answered."""
    response = served.chat(guided_regex=pattern, max_tokens=20)
    assert response.status_code in (200, 400)
    assert served.chat().status_code == 200


def test_a_dead_end_is_an_error_not_an_answer(served):
    """`b` matches nothing; the object that needs it can be begun but never finished."""
    dead = {"$ref": "#/$defs/b"}
    schema = {"type": "object", "properties": {"a": dead}, "required": ["a"], "$defs": {"b": dead}}
    response = served.chat(json_schema=schema, max_tokens=50)
    assert response.status_code == 400
    assert response.json()["error"]["hrt_code"] in ("HRT-4009", "HRT-4011")


def test_compiling_is_measured(served):
    answer(served, guided_choice=["once"])
    name = "halogen_grammar_compile_seconds_count"
    text = served.client.get("/metrics").text
    (count,) = [float(line.split()[1]) for line in text.splitlines() if line.startswith(name)]
    assert count > 0
