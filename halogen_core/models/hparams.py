"""Reading a checkpoint's hyper-parameters (GGUF keys) and tensors with typed errors."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from halogen_core.errors import ModelError
from halogen_core.spi import Checkpoint, QuantTensor

_MISSING: Any = object()


@attrs.frozen
class HParams:
    """The keys of one checkpoint, without the architecture prefix."""

    checkpoint: Checkpoint

    def integer(self, key: str, default: Any = _MISSING) -> int:
        """A whole number; raises `ModelError` where it is missing or of another kind."""
        value = self._uniform(key, default)
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise self._wrong(key, value, "a whole number")
        return int(value)

    def number(self, key: str, default: Any = _MISSING) -> float:
        """A finite number."""
        value = self._uniform(key, default)
        good = isinstance(value, int | float | np.integer | np.floating)
        if isinstance(value, bool) or not good or not np.isfinite(value):
            raise self._wrong(key, value, "a finite number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A number, or None where the key is missing or 0."""
        return self.number(key, 0.0) or None

    def text(self, key: str, default: str) -> str:
        value = self.checkpoint.hparams.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.checkpoint.hparams.get(key, default)
        if not isinstance(value, bool | np.bool_):
            raise self._wrong(key, value, "true or false")
        return bool(value)

    def per_layer(self, key: str, layers: int) -> list[Any] | None:
        """A list with one entry per layer, None where the key is missing or no list."""
        value = self.checkpoint.hparams.get(key)
        if value is None or isinstance(value, str) or not hasattr(value, "__len__"):
            return None
        if len(value) != layers:
            raise self._wrong(key, value, f"a list of {layers} entries, one per layer")
        return list(value)

    def has_tensor(self, name: str) -> bool:
        return name in self.checkpoint.names()

    def tensor(self, name: str, shape: tuple[int, ...]) -> QuantTensor:
        """A tensor that must exist and have this shape."""
        if not self.has_tensor(name):
            raise ModelError(
                f"tensor `{name}` is missing from `{self.checkpoint.path}`; architecture "
                f"`{self.checkpoint.architecture}` needs it with shape {shape}",
                code="HRT-2404",
                fix="the file is incomplete or of another architecture; fetch or convert it again",
            )
        found = self.checkpoint.tensor(name)
        if tuple(found.shape) != shape:
            raise ModelError(
                f"tensor `{name}` of `{self.checkpoint.path}` has shape {tuple(found.shape)}; "
                f"its hyper-parameters imply {shape}",
                code="HRT-2405",
                fix="the file contradicts itself; fetch or convert it again",
            )
        return found

    def _uniform(self, key: str, default: Any) -> Any:
        value = self.checkpoint.hparams.get(key, default)
        if value is _MISSING:
            raise ModelError(
                f"hyper-parameter `{key}` is missing from `{self.checkpoint.path}`; architecture "
                f"`{self.checkpoint.architecture}` needs it",
                code="HRT-2402",
                fix="the file is incomplete; fetch or convert it again",
            )
        if not isinstance(value, str) and hasattr(value, "__len__"):
            if len(value) == 0 or any(entry != value[0] for entry in value):
                raise self._wrong(key, value, "the same for every layer")
            return value[0]
        return value

    def _wrong(self, key: str, value: Any, allowed: str) -> ModelError:
        return ModelError(
            f"hyper-parameter `{key}` of `{self.checkpoint.path}` is {value!r}; it must be "
            f"{allowed}",
            code="HRT-2403",
            fix="fetch or convert the file again",
        )
