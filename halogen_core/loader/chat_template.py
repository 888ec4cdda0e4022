"""Chat templates: messages to token ids, with control tokens in user text kept plain text.

A template is a program from a model file, so it runs in Jinja's immutable sandbox under a budget of
loop turns, text and seconds (`template_sandbox`). What users write cannot become a control token:
each spelling of one inside the data is replaced by a single private-use character before rendering;
afterwards the rendered text is cut at the true control tokens and the spellings are put back in
between as plain text. Templates may strip, join and slice the data, the marks survive it; ids are
the same as of the plain way wherever nothing was marked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from halogen_core.errors import RequestError
from halogen_core.loader.template_sandbox import render
from halogen_core.loader.tokenizer import Tokenizer

Message = Mapping[str, Any]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""What is used where a model brings no template; callers say so (`has_chat_template`)."""

_FIRST_MARK, _LAST_MARK = 0xF0000, 0xFFFFD
_MARKS = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}]")


def has_chat_template(tokenizer: Tokenizer) -> bool:
    """Whether the model brings a template; without one ChatML is assumed, often wrongly."""
    return bool(tokenizer.chat_templates)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation; `template` instead of the model's own.

    Raises `RequestError` when the template refuses the messages or exceeds its budget, `ModelError`
    when it is no template.
    """
    marks = _Marks(tokenizer)
    text = render(
        template or chat_template(tokenizer, with_tools=bool(tools)),
        {
            **marks.protect(dict(template_kwargs or {})),
            "messages": marks.protect([dict(message) for message in messages]),
            "tools": marks.protect(list(tools)) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **_named_tokens(tokenizer),
        },
    )
    ids: list[int] = []
    for part in tokenizer.split_control(text):
        if isinstance(part, int):
            ids.append(part)
        else:
            ids += tokenizer.encode(marks.restore(part))
    return tokenizer.with_bos(ids)


def chat_template(tokenizer: Tokenizer, *, with_tools: bool = False) -> str:
    """The template's source: the one for tools if there is one, else the default, else ChatML."""
    templates = tokenizer.chat_templates
    if with_tools and "tool_use" in templates:
        return templates["tool_use"]
    return templates.get("default", CHATML)


def _named_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    names = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
    return {name: tokenizer.pieces[i] for name, i in names.items() if i is not None}


@attrs.define
class _Marks:
    """Control-token spellings found in data, by the private-use character that stands for each."""

    tokenizer: Tokenizer
    spellings: dict[str, int] = attrs.field(factory=dict)

    def protect(self, value: Any) -> Any:
        """A copy of JSON-like data with marks for control tokens (and for marks themselves)."""
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, Mapping):
            return {self.protect(k): self.protect(v) for k, v in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.protect(item) for item in value]
        return value

    def restore(self, text: str) -> str:
        spelt = list(self.spellings)
        return _MARKS.sub(
            lambda m: spelt[i] if (i := ord(m[0]) - _FIRST_MARK) < len(spelt) else m[0], text
        )

    def _protect_text(self, text: str) -> str:
        parts = (
            self._mark(self.tokenizer.pieces[part])
            if isinstance(part, int)
            else _MARKS.sub(lambda m: self._mark(m[0]), part)
            for part in self.tokenizer.split_control(text)
        )
        return "".join(parts)

    def _mark(self, spelling: str) -> str:
        index = self.spellings.setdefault(spelling, len(self.spellings))
        if index > _LAST_MARK - _FIRST_MARK:
            raise RequestError("the messages spell too many control tokens", param="messages")
        return chr(_FIRST_MARK + index)
