"""One quantised matrix of several stored tensors: found by suffix, read when asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from halogen_core.errors import ModelError
from halogen_core.loader import unpacking as un
from halogen_core.loader.safetensors import SafetensorsFile
from halogen_core.spi.operations import QuantTensor

Located = Mapping[str, tuple[SafetensorsFile, str]]
"""Tensors of one matrix by suffix."""
Reader = Callable[["PackedMatrix"], QuantTensor]


@attrs.frozen(eq=False)
class Scheme:
    """How the matrices of one model are packed."""

    suffixes: re.Pattern[str]
    """Ends of the names that together are one matrix `….weight`."""
    needed: tuple[str, ...]
    """Suffixes of which one is there where a matrix is packed."""
    read: Reader
    shape: Callable[[PackedMatrix], tuple[int, ...]]
    """From headers alone."""
    group_size: int = 0
    zeros_less_one: bool = False
    activations: bool = False
    """They are rounded to int8 too."""
    block: tuple[int, int] | None = None
    """Rows and columns under one scale."""
    marks: tuple[str, ...] = ()
    """Types of a `weight` that say without `needed` that it is packed: what lacks is then told."""
    note: str = ""
    """What the file wants beyond its weights and does not get."""

    def packs(self, tensors: Located) -> bool:
        """Whether tensors of one name are a packed matrix."""
        if any(suffix in tensors for suffix in self.needed):
            return True
        return "weight" in tensors and _dtype(tensors, "weight") in self.marks


@attrs.frozen(eq=False)
class PackedMatrix:
    """One matrix: where its tensors lie and how to read them."""

    scheme: Scheme
    name: str
    tensors: Located

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix as computed with."""
        try:
            return self.scheme.shape(self)
        except (KeyError, IndexError, ValueError, un.Unfit) as exc:
            raise self.refusal(f"its tensors have odd shapes ({exc!r})") from exc

    def stored_shape(self, suffix: str) -> tuple[int, ...]:
        """Of the tensor with this suffix."""
        file, key = self.tensors[suffix]
        return file.tensors[key].shape

    def stored_dtype(self, suffix: str) -> str:
        """Of the tensor with this suffix, as the file spells it."""
        return _dtype(self.tensors, suffix)

    def array(self, suffix: str) -> un.Array:
        """The tensor with this suffix, as stored."""
        file, key = self.tensors[suffix]
        entry = file.tensors[key]
        return un.array(file.view(key), entry.dtype, entry.shape)

    def tensor(self) -> QuantTensor:
        """In canonical form; raises `ModelError` (HRT-2011)."""
        try:
            return self.scheme.read(self)
        except KeyError as exc:
            raise self.refusal(f"it has no `{exc.args[0]}`") from exc
        except (un.Unfit, ValueError) as exc:
            raise self.refusal(str(exc)) from exc

    def refusal(self, reason: str) -> ModelError:
        """Why this matrix cannot be taken."""
        path = next(iter(self.tensors.values()))[0].path
        return refused(path, f"quantised tensor `{self.name}` of `{path}` cannot be read: {reason}")


def stacked(tensors: list[QuantTensor], name: str) -> QuantTensor:
    """Matrices of one layer's experts as one [E, N, K]."""
    first = tensors[0]
    keys = {
        (t.format, t.shape, *sorted(t.aux), *t.aux.get("block", un.EMPTY).tolist()) for t in tensors
    }
    if len(keys) > 1 or "perm" in first.aux:
        raise refused(
            Path(name),
            f"the experts of `{name}` are packed differently or in an order of their own",
        )
    return QuantTensor(
        format=first.format,
        shape=(len(tensors), *first.shape),
        data=un.joined([t.data for t in tensors]),
        name=name,
        aux={key: _together(key, tensors) for key in first.aux},
    )


def _together(key: str, tensors: list[QuantTensor]) -> un.Array:
    """One of `aux` for all experts; the size of blocks is theirs together."""
    each = [tensor.aux[key] for tensor in tensors]
    return each[0] if key == "block" else un.joined([one[None] for one in each])


def refused(path: Path, message: str) -> ModelError:
    return ModelError(
        message, code="HRT-2011", fix="take the unquantised model, or a GGUF conversion of it"
    )


def packed_matrices(
    files: Sequence[SafetensorsFile], scheme: Scheme | None
) -> dict[str, PackedMatrix]:
    """Quantised matrices by the name (`….weight`) that they would have unquantised."""
    if scheme is None:
        return {}
    found: dict[str, dict[str, tuple[SafetensorsFile, str]]] = {}
    for file in files:
        for key in file.tensors:
            suffix = scheme.suffixes.search(key)
            if suffix:
                name = f"{key[: suffix.start()]}.weight"
                found.setdefault(name, {})[suffix[1]] = (file, key)
    return {
        name: PackedMatrix(scheme, name, tensors)
        for name, tensors in found.items()
        if scheme.packs(tensors)
    }


def _dtype(tensors: Located, suffix: str) -> str:
    file, key = tensors[suffix]
    return file.tensors[key].dtype
