"""Tokenizers from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from halogen_core.errors import ModelError
from halogen_core.loader.pretokenizers import WHOLE_WORDS_FIRST, pre_tokenizer
from halogen_core.loader.tokenizer import Tokenizer, TokenKind, named_end_tokens

_PREFIX = "tokenizer.ggml."
_MODELS = ("gpt2", "llama", "gemma4")


@attrs.frozen
class _Metadata:
    """Typed look-ups in the metadata of the file at `path`."""

    values: Mapping[str, Any]
    path: str

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.values.get(_PREFIX + key)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self.fail(f"`{_PREFIX}{key}` is of the wrong type")
        return value

    def fail(self, reason: str) -> ModelError:
        return ModelError(
            f"model `{self.path}` has no usable tokenizer: {reason}",
            code="HRT-2103",
            fix="convert the model again with a current converter",
        )

    def token_id(self, key: str, size: int) -> int | None:
        value = self.get(key, int)
        return value if value is not None and 0 <= value < size else None


def gguf_tokenizer(values: Mapping[str, Any], path: str) -> Tokenizer:
    """The tokenizer that GGUF metadata describe; raises `ModelError`."""
    metadata = _Metadata(values, path)
    model = metadata.get("model", str, "")
    if model not in _MODELS:
        raise metadata.fail(f"its kind is `{model}`; halogen builds {', '.join(_MODELS)}")
    pieces = _pieces(metadata)
    kinds = _kinds(metadata, len(pieces))
    if model == "gpt2":
        _expressions(metadata)
    elif "tokenizer.ggml.merges" not in values:
        _scores(metadata, len(pieces))
    build = _Recipe(metadata, pieces, tuple(kinds))
    bos = metadata.token_id("bos_token_id", len(pieces))
    ends = (metadata.token_id(f"{k}_token_id", len(pieces)) for k in ("eos", "eot", "eom"))
    marks = {i for i in (bos, *ends) if i is not None}
    for token in marks:
        kinds[token] = TokenKind.CONTROL
    return Tokenizer(
        build=build,
        pieces=pieces,
        kinds=kinds,
        byte_level=model == "gpt2",
        bos_token_id=bos,
        eos_token_id=metadata.token_id("eos_token_id", len(pieces)),
        add_bos=metadata.get("add_bos_token", bool, _bos_by_default(metadata, model)),
        end_token_ids=frozenset((marks - {bos}) | named_end_tokens(pieces, kinds)),
        chat_templates=_chat_templates(values),
    )


@attrs.define
class _Recipe:
    """Builds the library's tokenizer once, for all that share it; then the merges are let go."""

    metadata: _Metadata
    pieces: Sequence[str]
    kinds: Sequence[int]
    built: tokenizers.Tokenizer | None = None

    def __call__(self) -> tokenizers.Tokenizer:
        if self.built is not None:
            return self.built
        metadata, pieces, kinds = self.metadata, self.pieces, self.kinds
        if metadata.get("model", str) == "gpt2":
            core = _byte_level(metadata, pieces)
        else:
            core = _sentencepiece(metadata, pieces, kinds)
        _add_tokens(core, pieces, kinds)
        core.encode_special_tokens = True
        self.metadata, self.pieces, self.kinds = _Metadata({}, metadata.path), (), ()
        self.built = core
        return core


def _bos_by_default(metadata: _Metadata, model: str) -> bool:
    return model == "llama" or metadata.get("pre", str, "default") in WHOLE_WORDS_FIRST


def _pieces(metadata: _Metadata) -> list[str]:
    pieces: list[str] = metadata.get("tokens", list, [])
    if not pieces or not isinstance(pieces[0], str):
        raise metadata.fail("it has no token list")
    return [piece or f"[EMPTY_{i}]" for i, piece in enumerate(pieces)]


def _kinds(metadata: _Metadata, size: int) -> list[int]:
    array = metadata.get("token_type", np.ndarray)
    if array is None:
        return [int(TokenKind.NORMAL)] * size
    if array.dtype.kind not in "iu" or len(array) != size:
        raise metadata.fail(f"{len(array)} token types for {size} tokens")
    kinds: list[int] = array.tolist()
    return kinds


def _chat_templates(values: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {
        name.removeprefix(f"{key}."): text
        for name, text in values.items()
        if name.startswith(f"{key}.") and isinstance(text, str)
    }
    default = values.get(key)
    return named | ({"default": default} if isinstance(default, str) else {})


def _add_tokens(core: tokenizers.Tokenizer, pieces: Sequence[str], kinds: Sequence[int]) -> None:
    for special, kind in ((True, TokenKind.CONTROL), (False, TokenKind.USER_DEFINED)):
        tokens = [
            AddedToken(piece, special=special, normalized=False)
            for piece, k in zip(pieces, kinds, strict=True)
            if k == kind
        ]
        if special:
            core.add_special_tokens(tokens)
        else:
            core.add_tokens(tokens)


def _merges(metadata: _Metadata, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs of which both halves and the whole are in the vocabulary, best first."""
    pairs: list[tuple[str, str]] = []
    for merge in metadata.get("merges", list, []):
        # A piece may itself start with a space (SentencePiece-style BPE), so look from index 1.
        left, _, right = merge[1:].partition(" ")
        left = merge[:1] + left
        if left in vocabulary and right in vocabulary and left + right in vocabulary:
            pairs.append((left, right))
    return pairs


# ---------------------------------------------------------------- byte-level BPE


def _expressions(metadata: _Metadata) -> Sequence[str]:
    return pre_tokenizer(metadata.get("pre", str, "default"), metadata.path)


def _byte_level(metadata: _Metadata, pieces: Sequence[str]) -> tokenizers.Tokenizer:
    expressions = _expressions(metadata)
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    core = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            _merges(metadata, vocabulary),
            ignore_merges=metadata.get("pre", str) in WHOLE_WORDS_FIRST,
        )
    )
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    return core


# ---------------------------------------------------------------- SentencePiece


def _sentencepiece(
    metadata: _Metadata, pieces: Sequence[str], kinds: Sequence[int]
) -> tokenizers.Tokenizer:
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    if "tokenizer.ggml.merges" in metadata.values:
        merges = _merges(metadata, vocabulary)
    else:
        merges = _merges_by_score(metadata, pieces, kinds, vocabulary)
    unknown = metadata.token_id("unknown_token_id", len(pieces)) or 0
    core = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, unk_token=pieces[unknown])
    )
    spaces = normalizers.Replace(" ", "▁")
    prefixed = metadata.get("add_space_prefix", bool, metadata.get("model", str) == "llama")
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), spaces] if prefixed else [spaces]
    )
    return core


def _scores(metadata: _Metadata, size: int) -> NDArray[np.float32]:
    scores: NDArray[np.float32] | None = metadata.get("scores", np.ndarray)
    if scores is None or len(scores) != size:
        raise metadata.fail("it has neither merges nor a score per token")
    return scores


def _merges_by_score(
    metadata: _Metadata,
    pieces: Sequence[str],
    kinds: Sequence[int],
    vocabulary: Mapping[str, int],
) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose whole scores best: every cut of every token, sorted."""
    scores = _scores(metadata, len(pieces))
    order = np.argsort(-scores.astype(np.float64), kind="stable").tolist()
    mergeable = (TokenKind.NORMAL, TokenKind.USER_DEFINED)
    return [
        (left, right)
        for token in order
        if kinds[token] in mergeable
        for piece in (pieces[token],)
        for at in range(1, len(piece))
        if (left := piece[:at]) in vocabulary and (right := piece[at:]) in vocabulary
    ]
