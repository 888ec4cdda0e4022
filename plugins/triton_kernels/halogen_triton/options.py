"""Values of `--backend-option`; each function raises `ConfigError` for what it cannot be."""

from __future__ import annotations

from halogen_core.spi import ConfigError
from halogen_triton import flash_attn_pack
from halogen_triton.capture import BUCKETS


def whole(key: str, value: str | int) -> int:
    """A number from 0."""
    if not str(value).isdigit():
        raise ConfigError(
            f"`{key}` is `{value}`; allowed are whole numbers from 0",
            code="HRT-3408",
            fix=f"check --backend-option {key}=...",
        )
    return int(value)


def switch(key: str, value: str) -> bool:
    """Whether it is `on`; `off` is the only other value."""
    if value not in ("on", "off"):
        raise ConfigError(
            f"backend option `{key}` is `{value}`; allowed are on, off",
            code="HRT-3415",
            fix=f"check --backend-option {key}=...",
        )
    return value == "on"


def buckets(text: str | None) -> tuple[int, ...]:
    """Row counts from `1,2,4,8`."""
    if text is None:
        return BUCKETS
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or found[0] < 1:
        raise ConfigError(
            f"backend option `buckets` is `{text}`; allowed are row counts from 1, like 1,2,4,8",
            code="HRT-3406",
            fix="check --backend-option buckets=...",
        )
    return found


def attention(value: str) -> str:
    """Whose attention: `auto`, `triton` or `flash-attn`."""
    if value not in ("auto", "triton", "flash-attn"):
        raise ConfigError(
            f"backend option `attention` is `{value}`; allowed are auto, triton, flash-attn",
            code="HRT-3413",
            fix="check --backend-option attention=...",
        )
    if value == "flash-attn" and not flash_attn_pack.installed():
        raise ConfigError(
            "attention by flash-attn was asked for, and flash-attn is not installed",
            code="HRT-3413",
            fix="pip install 'halogen-cuda[flash-attn]', or leave the option out",
        )
    return value
