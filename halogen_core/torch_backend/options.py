"""`--backend-option key=value` of torch backends."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from halogen_core.errors import ConfigError

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def refuse_unknown(given: Mapping[str, str], known: Collection[str], backend: str) -> None:
    """Raises `ConfigError` (HRT-3105) for a key that `backend` does not know."""
    for key in given:
        if key not in known:
            raise ConfigError(
                f"backend option `{key}` is unknown to `{backend}`; known are {', '.join(known)}",
                code="HRT-3105",
                fix="check --backend-option",
            )


def chosen_dtype(given: Mapping[str, str], default: torch.dtype) -> torch.dtype:
    """The compute dtype; raises `ConfigError` (HRT-3106) for one that there is not."""
    asked = given.get("dtype")
    if asked is None:
        return default
    if asked not in DTYPES:
        raise ConfigError(
            f"backend option `dtype` is `{asked}`; allowed are {', '.join(DTYPES)}",
            code="HRT-3106",
            fix="check --backend-option dtype=...",
        )
    return DTYPES[asked]
