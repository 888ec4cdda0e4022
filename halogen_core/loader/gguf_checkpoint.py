"""A GGUF model, in one file or in shards, as a `Checkpoint`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from halogen_core.errors import ModelError
from halogen_core.loader.architecture import ARCHITECTURES
from halogen_core.loader.content import content_hash
from halogen_core.loader.failures import unfit
from halogen_core.loader.gguf import GGUFFile, TensorEntry, read_gguf
from halogen_core.spi.operations import QuantTensor, RopeStyle

_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")


@attrs.frozen(eq=False)
class GGUFCheckpoint:
    """Implements `spi.Checkpoint`; `metadata` also has the tokenizer's keys."""

    files: tuple[GGUFFile, ...]
    _table: Mapping[str, tuple[GGUFFile, TensorEntry]]

    @property
    def path(self) -> str:
        return str(self.files[0].path)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Everything the first file says, keys and values as written."""
        return self.files[0].metadata

    @property
    def architecture(self) -> str:
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise unfit(self.path, "`general.architecture` is missing")
        return name

    @cached_property
    def hparams(self) -> Mapping[str, Any]:
        prefix = f"{self.architecture}."
        values = {
            key.removeprefix(prefix): value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in self.metadata.items()
            if key.startswith(prefix)
        }
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list):  # as llama.cpp: tables have a row per token
            values["vocab_size"] = len(tokens)
        return values

    @property
    def rope_style(self) -> RopeStyle:
        known = ARCHITECTURES.get(self.architecture)
        return known.gguf_rope_style if known else RopeStyle.NEOX

    @cached_property
    def content_id(self) -> str:
        return content_hash(
            (file.data[: file.header_bytes], map(file.view, file.tensors.values()))
            for file in self.files
        )

    def names(self) -> Collection[str]:
        return self._table.keys()

    def stored(self, name: str) -> list[tuple[str, int]]:
        """Format and bytes in the file, from headers alone."""
        _, entry = self._table[name]
        return [(entry.format, entry.nbytes)]

    def tensor(self, name: str) -> QuantTensor:
        try:
            file, entry = self._table[name]
        except KeyError:
            raise unfit(self.path, f"tensor `{name}` is missing") from None
        return QuantTensor(format=entry.format, shape=entry.shape, data=file.view(entry), name=name)


def open_gguf(path: Path) -> GGUFCheckpoint:
    """Open a GGUF model; given the first shard, open them all."""
    first = read_gguf(path)
    paths = _shard_paths(path, first)
    files = (first, *(read_gguf(shard) for shard in paths[1:]))
    if len(files) > 1:
        _check_shards(files)
    table: dict[str, tuple[GGUFFile, TensorEntry]] = {}
    for file in files:
        for name, entry in file.tensors.items():
            if name in table:
                raise _shard_error(path, f"tensor `{name}` is in two shards")
            table[name] = (file, entry)
    return GGUFCheckpoint(files, table)


def _shard_paths(path: Path, first: GGUFFile) -> Sequence[Path]:
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or count <= 1:
        return [path]
    match = _SHARD.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise _shard_error(path, f"it is one of {count} shards but its name does not say so")
    shards = [
        path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)
    ]
    if first.metadata.get("split.no") != 0 or path != shards[0]:
        raise _shard_error(path, f"it is not the first shard; give `{shards[0]}`")
    absent = [shard.name for shard in shards if not shard.is_file()]
    if absent:
        raise _shard_error(path, f"{len(absent)} of {count} shards are missing: {absent[0]} …")
    return shards


def _check_shards(files: Sequence[GGUFFile]) -> None:
    """Every shard knows its place, and together they hold as many tensors as the first says."""
    for index, file in enumerate(files):
        number, count = file.metadata.get("split.no"), file.metadata.get("split.count")
        if (number, count) != (index, len(files)):
            raise _shard_error(
                file.path, f"it says shard {number} of {count}, {index} of {len(files)} is due"
            )
    total, due = sum(len(f.tensors) for f in files), files[0].metadata.get("split.tensors.count")
    if total != due:
        raise _shard_error(files[0].path, f"the shards hold {total} tensors, {due} are due")


def _shard_error(path: Path, reason: str) -> ModelError:
    return ModelError(
        f"sharded model `{path}` is incomplete: {reason}",
        code="HRT-2009",
        fix="keep all shards of one download in one directory and name the first",
    )
