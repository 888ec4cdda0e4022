"""A Hugging Face directory of safetensors as a `Checkpoint`, names as in GGUF."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from halogen_core.errors import ModelError
from halogen_core.loader.content import content_hash
from halogen_core.loader.failures import damaged, unfit
from halogen_core.loader.hf_config import HFConfig, read_config, read_json
from halogen_core.loader.hf_files import inside, weight_files
from halogen_core.loader.int8 import Int8, read_int8
from halogen_core.loader.packed_matrix import PackedMatrix, packed_matrices, stacked
from halogen_core.loader.quantised import read_scheme
from halogen_core.loader.safetensors import SafetensorsEntry, SafetensorsFile, read_safetensors
from halogen_core.spi.arrays import Bytes
from halogen_core.spi.float8 import FLOAT8
from halogen_core.spi.operations import QuantTensor, RopeStyle

logger = logging.getLogger(__name__)
_DTYPES = ("F32", "F16", "BF16")
_TEXT_PREFIX = re.compile(r"^(model\.)?language_model\.(model\.)?")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# scales of a KV cache in fp8 are for a storage that is not ours
_IGNORED = re.compile(
    r"vision_tower|multi_modal_projector|rotary_emb\.inv_freq|attn_rot_embd|\.(q|k|v|kv)_scale$"
)


_Located = tuple[SafetensorsFile, str]


@attrs.frozen(eq=False)
class _Source:
    """Where one tensor's values lie; stacked parts are the experts of one layer."""

    parts: tuple[_Located, ...]
    stacked: bool = False
    plus_one: bool = False
    """Gemma stores a norm's weight less one."""
    packed: tuple[PackedMatrix, ...] = ()
    """A quantised matrix, or one per expert; `parts` are then its tensors as stored."""


@attrs.frozen(kw_only=True, eq=False)
class HFCheckpoint:
    """Implements `spi.Checkpoint`."""

    directory: Path
    config: HFConfig
    _sources: Mapping[str, _Source]
    _int8: Mapping[str, Int8] = attrs.field(factory=dict)
    """By key of the file, for tensors that `halogen convert` quantised."""

    @property
    def path(self) -> str:
        return str(self.directory)

    @property
    def architecture(self) -> str:
        return self.config.architecture

    @property
    def hparams(self) -> Mapping[str, Any]:
        return self.config.hparams

    @property
    def rope_style(self) -> RopeStyle:
        return RopeStyle.NEOX

    @cached_property
    def content_id(self) -> str:
        config = np.frombuffer((self.directory / "config.json").read_bytes(), np.uint8)
        files = {f.path: f for s in self._sources.values() for f, _ in s.parts}
        return content_hash(
            [
                (config, []),
                *((f.data[: f.header_bytes], map(f.view, f.tensors)) for f in files.values()),
            ]
        )

    def names(self) -> Collection[str]:
        computed = [] if self.config.rope_freqs is None else ["rope_freqs.weight"]
        return [*self._sources, *computed]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from headers alone."""
        source = self._sources.get(name)
        if source is None or not source.packed:
            return self.tensor(name).shape
        lead = (len(source.packed),) if source.stacked else ()
        return (*lead, *source.packed[0].shape)

    def stored(self, name: str) -> list[tuple[str, int]]:
        """Type and bytes of each stored tensor that `name` is made of, from headers alone."""
        source = self._sources.get(name)
        entries = [] if source is None else [file.tensors[key] for file, key in source.parts]
        return [(entry.dtype, entry.nbytes) for entry in entries]

    def tensor(self, name: str) -> QuantTensor:
        if name == "rope_freqs.weight" and self.config.rope_freqs is not None:
            freqs = self.config.rope_freqs
            return QuantTensor(
                format="F32", shape=freqs.shape, data=freqs.view(np.uint8), name=name
            )
        source = self._sources.get(name)
        if source is None:
            raise unfit(self.path, f"tensor `{name}` is missing")
        if source.packed:
            return _unpacked(source, name)
        file, key = source.parts[0]
        entry = file.tensors[key]
        shape, data = entry.shape, file.view(key)
        if entry.dtype == "I8":
            int8 = self._int8[key]
            return QuantTensor(
                format=int8.scheme, shape=shape, data=data, name=name, aux={"scale": int8.scale}
            )
        if source.stacked:
            shape = (len(source.parts), *shape)
            data = np.concatenate([f.view(k) for f, k in source.parts])
        if source.plus_one:
            return QuantTensor(
                format="F32", shape=shape, data=_plus_one(data, entry.dtype), name=name
            )
        return QuantTensor(format=entry.dtype, shape=shape, data=data, name=name)


def open_directory(directory: Path) -> HFCheckpoint:
    """Open a directory with config.json and safetensors; raises `ModelError`."""
    config = read_config(inside(directory, "config.json"))
    files = [read_safetensors(path) for path in weight_files(directory)]
    table = read_json(inside(directory, "config.json"))
    int8 = read_int8(directory, table)
    scheme = read_scheme(directory / "config.json", table)
    if scheme is not None and scheme.note:
        logger.info("%s: %s", directory, scheme.note)
    packed = packed_matrices(files, scheme)
    # under a scheme 8-bit floats have scales; where these are missing the values are not the codes
    plain_types = _DTYPES if scheme else (*_DTYPES, *FLOAT8)
    return HFCheckpoint(
        directory=directory,
        config=config,
        sources=_sources(directory, config, files, int8, packed, plain_types),
        int8=int8,
    )


# ---------------------------------------------------------------- names and values


def _sources(
    directory: Path,
    config: HFConfig,
    files: Sequence[SafetensorsFile],
    int8: Mapping[str, Int8],
    packed: Mapping[str, PackedMatrix],
    plain_types: Sequence[str],
) -> dict[str, _Source]:
    experts: dict[str, dict[int, _Located]] = {}
    sources: dict[str, _Source] = {}
    taken = {key for matrix in packed.values() for _, key in matrix.tensors.values()}
    plain = [(f, key) for f in files for key in f.tensors if key not in taken]
    matrices = [(next(iter(m.tensors.values()))[0], key) for key, m in packed.items()]
    for file, key, name, expert in _renamed(directory, config, [*plain, *matrices]):
        if key not in packed and not _read_as_stored(file.tensors[key], plain_types, key in int8):
            raise _unread_dtype(file, key)
        if name == "output.weight" and config.tied_embeddings:
            continue
        if expert is not None:
            experts.setdefault(name, {})[expert] = (file, key)
        elif name in sources:
            raise damaged(file.path, f"two tensors are called `{name}`")
        else:
            plus_one = config.architecture == "gemma3" and "norm" in name
            matrix = (packed[key],) if key in packed else ()
            parts = tuple(packed[key].tensors.values()) if key in packed else ((file, key),)
            sources[name] = _Source(parts, plus_one=plus_one, packed=matrix)
    return sources | {
        name: _stacked(directory, name, parts, packed) for name, parts in experts.items()
    }


def _renamed(
    directory: Path, config: HFConfig, located: Sequence[_Located]
) -> Iterator[tuple[SafetensorsFile, str, str, int | None]]:
    """(file, name there, GGUF name, expert) of every tensor that matters."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    layers = config.hparams.get("block_count")
    if type(layers) is not int or not 1 <= layers <= 512:
        raise unfit(str(directory), f"`num_hidden_layers` is {layers!r}; 1 … 512 are allowed")
    table = get_tensor_name_map(MODEL_ARCH[config.architecture.upper()], layers)
    for file, key in located:
        if _IGNORED.search(key):
            continue
        plain = _TEXT_PREFIX.sub(lambda m: "" if "lm_head" in m.string else "model.", key)
        expert = _EXPERT.search(plain)
        name = table.get_name(_EXPERT.sub(".experts.", plain), try_suffixes=(".weight", ".bias"))
        if name is None:
            raise unfit(str(directory), f"tensor `{key}` is unknown")
        yield file, key, name, int(expert[1]) if expert else None


def _stacked(
    directory: Path,
    name: str,
    parts: Mapping[int, _Located],
    packed: Mapping[str, PackedMatrix],
) -> _Source:
    matrices = tuple(packed[parts[i][1]] for i in sorted(parts) if parts[i][1] in packed)
    kinds = {(f.tensors[k].dtype, f.tensors[k].shape) for f, k in parts.values() if not matrices}
    mixed = matrices and len(matrices) != len(parts)
    if sorted(parts) != list(range(len(parts))) or len(kinds) > 1 or mixed:
        raise unfit(str(directory), f"the experts of `{name}` are incomplete or unlike")
    if matrices:
        stored = tuple(part for matrix in matrices for part in matrix.tensors.values())
        return _Source(stored, stacked=True, packed=matrices)
    return _Source(tuple(parts[i] for i in range(len(parts))), stacked=True)


def _unpacked(source: _Source, name: str) -> QuantTensor:
    tensors = [attrs.evolve(matrix.tensor(), name=name) for matrix in source.packed]
    return stacked(tensors, name) if source.stacked else tensors[0]


def _read_as_stored(
    entry: SafetensorsEntry, plain_types: Sequence[str], has_int8_scale: bool
) -> bool:
    """Whether a tensor is taken as it is; a vector of 8-bit floats is not, nobody stores any."""
    if entry.dtype in FLOAT8 and len(entry.shape) != 2:
        return False
    return entry.dtype in plain_types or (entry.dtype == "I8" and has_int8_scale)


def _unread_dtype(file: SafetensorsFile, key: str) -> ModelError:
    return ModelError(
        f"tensor `{key}` of `{file.path}` has type {file.tensors[key].dtype}; "
        f"halogen reads {', '.join(_DTYPES)}, and {', '.join(FLOAT8)} in matrices",
        code="HRT-2006",
        fix="take the model in one of these types, or a GGUF conversion of it",
    )


def _plus_one(data: Bytes, dtype: str) -> Bytes:
    """The values plus one, as float32 bytes."""
    if dtype == "BF16":
        values = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = data.view(np.float16 if dtype == "F16" else np.float32)
    return (values.astype(np.float32) + np.float32(1)).view(np.uint8)
