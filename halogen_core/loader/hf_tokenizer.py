"""Tokenizers of Hugging Face directories: tokenizer.json and the files around it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from halogen_core.errors import ModelError
from halogen_core.loader.hf_config import read_json
from halogen_core.loader.tokenizer import Tokenizer, TokenKind, named_end_tokens

_CONTROL_LIKE = re.compile(r"<\|.*\|>|<｜.*｜>|<(start|end)_of_turn>|<unused\d+>", re.DOTALL)


def hf_tokenizer(directory: Path) -> Tokenizer:
    """Build the tokenizer of a model directory; raises `ModelError`."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise _unusable(file, "there is no such file")
    try:
        core = tokenizers.Tokenizer.from_file(str(file))
    except Exception as exc:  # the library raises bare exceptions
        raise _unusable(file, str(exc)) from exc
    core = _with_control_tokens(core)
    core.no_truncation()
    core.no_padding()
    settings = _read_optional(directory / "tokenizer_config.json")
    pieces, kinds = _vocabulary(core)
    ends = _end_token_ids(directory, settings, core)
    bos = _token_id(core, settings.get("bos_token"))
    for token in ends if bos is None else {*ends, bos}:
        if token < len(kinds):
            kinds[token] = TokenKind.CONTROL
    # Ask before control tokens become plain text: the post-processor tells whether BOS is added.
    add_bos = bos is not None and core.encode("").ids[:1] == [bos]
    core.encode_special_tokens = True
    return Tokenizer(
        build=lambda: core,
        pieces=pieces,
        kinds=kinds,
        byte_level="ByteLevel" in repr(core.decoder),
        bos_token_id=bos,
        eos_token_id=_token_id(core, settings.get("eos_token")),
        add_bos=bool(settings.get("add_bos_token", add_bos)) and bos is not None,
        end_token_ids=frozenset(ends | named_end_tokens(pieces, kinds)),
        chat_templates=_chat_templates(directory, settings),
    )


def _with_control_tokens(core: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """`core` with tokens such as `<|user|>` special, though their file forgot to say so.

    Otherwise users could write them; converters to GGUF do the same.
    """
    added = core.get_added_tokens_decoder().values()
    if not any(_CONTROL_LIKE.fullmatch(token.content) and not token.special for token in added):
        return core
    description = json.loads(core.to_str())
    for token in description["added_tokens"]:
        token["special"] |= _CONTROL_LIKE.fullmatch(token["content"]) is not None
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def _vocabulary(core: tokenizers.Tokenizer) -> tuple[list[str], list[int]]:
    """Pieces and kinds by id; ids that the vocabulary leaves out are unused and empty."""
    table = core.get_vocab(with_added_tokens=True)
    pieces = [""] * (max(table.values(), default=-1) + 1)
    kinds = [int(TokenKind.UNUSED)] * len(pieces)
    for piece, token in table.items():
        pieces[token], kinds[token] = piece, TokenKind.NORMAL
    for token, added in core.get_added_tokens_decoder().items():
        kinds[token] = TokenKind.CONTROL if added.special else TokenKind.USER_DEFINED
    return pieces, kinds


def _end_token_ids(
    directory: Path, settings: Mapping[str, Any], core: tokenizers.Tokenizer
) -> set[int]:
    ends: set[int] = set()
    for source in ("generation_config.json", "config.json"):
        value = _read_optional(directory / source).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        ends |= {v for v in values if type(v) is int and v >= 0}
    named = _token_id(core, settings.get("eos_token"))
    return ends if named is None else ends | {named}


def _token_id(core: tokenizers.Tokenizer, token: Any) -> int | None:
    """The id of a token given as text or as a serialised `AddedToken`."""
    if isinstance(token, dict):
        token = token.get("content")
    return core.token_to_id(token) if isinstance(token, str) else None


def _chat_templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    file = directory / "chat_template.jinja"
    value = settings.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        templates = {
            t["name"]: t["template"]
            for t in value
            if isinstance(t, dict) and {"name", "template"} <= t.keys()
        }
    if file.is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    return templates


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _unusable(file: Path, reason: str) -> ModelError:
    return ModelError(
        f"model `{file.parent}` has no usable tokenizer: `{file.name}`: {reason}",
        code="HRT-2103",
        fix="download tokenizer.json with the model, or take a GGUF conversion of it",
    )
