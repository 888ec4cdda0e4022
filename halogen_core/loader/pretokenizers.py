"""How byte-level BPE vocabularies cut text into words, by GGUF's `tokenizer.ggml.pre` name.

Each entry is a list of regular expressions applied one after another, each to what the ones before
left whole. They come from the models' own tokenizer.json files; llama.cpp is the oracle in tests.
"""

from __future__ import annotations

from collections.abc import Mapping

from halogen_core.errors import ModelError

_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_TAIL = r"|\s*[\r\n]+|" + _SPACES
_DIGIT = r"\p{N}"
_THREE_DIGITS = r"[0-9][0-9][0-9]"
_CJK_TO_HANGUL = "[一-龥ࠀ-一가-퟿]+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _llama3(*, word: str = r"\p{L}", other: str = r"\p{L}", digits: str) -> str:
    """The family that keeps line ends with punctuation and cuts digits into groups."""
    return (
        rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?{word}+|{digits}"
        rf"| ?[^\s{other}\p{{N}}]+[\r\n]*" + _TAIL
    )


def _cased(*, suffix: str, digits: str) -> str:
    """The family that also cuts words where lower case turns to upper."""
    return (
        rf"{_LEAD}{_UPPER}*{_LOWER}+{suffix}|{_LEAD}{_UPPER}+{_LOWER}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _TAIL
    )


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
_LLAMA3 = _llama3(digits=r"\p{N}{1,3}")
_QWEN2 = _llama3(digits=_DIGIT)
_QWEN35 = _llama3(word=r"[\p{L}\p{M}]", other=r"\p{L}\p{M}", digits=_DIGIT)
_GPT4O = _cased(suffix=_SUFFIXES + "?", digits=r"\p{N}{1,3}")
_TEKKEN = _cased(suffix="", digits=_DIGIT)
_FALCON = [r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE_DIGITS]
_DEFAULT = [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE_DIGITS]
_DEEPSEEK_CODER = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_TO_HANGUL, _DIGIT]
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    # in numbers: normalising these characters in an editor would change the ranges
    r"\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}"
    r"\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}"
    r"\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}"
    r"\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}\x{2126}"
    r"\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}"
    "ↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "\U00010400-\U0001044f𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = [
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _CJK_TO_HANGUL,
    r"\p{N}+",
]
_DEEPSEEK_V3 = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _TAIL,
]

_NAMES: Mapping[str, tuple[list[str], str]] = {
    "gpt2": (
        [_GPT2],
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat mellum "
        "a.x-4.0 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe",
    ),
    "digits": ([_DIGIT, _GPT2], "smollm starcoder refact command-r codeshell exaone minerva-7b"),
    "llama3": (
        [_LLAMA3],
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 "
        "dbrx smaug-bpe glm4 chatglm-bpe",
    ),
    "qwen2": ([_QWEN2], "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan grok-2"),
    "qwen35": ([_QWEN35], "qwen35"),
    "gpt4o": ([_GPT4O], "gpt-4o llama4 minimax-m2"),
    "tekken": ([_TEKKEN], "tekken"),
    "deepseek-coder": (_DEEPSEEK_CODER, "deepseek-coder"),
    "deepseek-llm": (_DEEPSEEK_LLM, "deepseek-llm"),
    "deepseek-v3": (_DEEPSEEK_V3, "deepseek-v3 hunyuan-dense"),
    "falcon": (_FALCON, "falcon"),
    "default": (_DEFAULT, "default"),
}
PRE_TOKENIZERS: Mapping[str, list[str]] = {
    name: regexes for regexes, names in _NAMES.values() for name in names.split()
}
WHOLE_WORDS_FIRST = frozenset(
    [
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "tekken",
    ]
)
"""A word that is itself in the vocabulary is taken whole, whatever the merges say; the same
vocabularies start with BOS when the file does not say."""


def pre_tokenizer(name: str, path: str) -> list[str]:
    """The expressions of `name`; raises `ModelError` rather than guess."""
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    raise ModelError(
        f"the tokenizer of `{path}` cuts words in a way named `{name}`; halogen knows "
        f"{', '.join(sorted(PRE_TOKENIZERS))}",
        code="HRT-2102",
        fix="another rule would give wrong tokens silently; convert the model again, or report it",
    )
