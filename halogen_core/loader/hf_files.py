"""Which files of a Hugging Face directory hold the weights, and which are never opened."""

from __future__ import annotations

from pathlib import Path

from halogen_core.errors import ModelError
from halogen_core.loader.failures import damaged, foreign, missing
from halogen_core.loader.hf_config import read_json
from halogen_core.loader.int8 import SCALES_FILE

_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def inside(directory: Path, name: str) -> Path:
    """The file called `name` there; refuses names and links that lead out of the model.

    The hub's cache is allowed: `models--x/snapshots/<rev>/file` links to `models--x/blobs/<hash>`.
    """
    path = directory / name
    root = directory.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if Path(name).name == name and path.resolve().parent in allowed:
        return path
    raise ModelError(
        f"`{path}` leads out of the model's directory",
        code="HRT-2013",
        fix="copy the file into the directory, or download the model again",
    )


def weight_files(directory: Path) -> list[Path]:
    if (directory / _INDEX).is_file():
        weight_map = read_json(inside(directory, _INDEX)).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) for name in weight_map.values()
        ):
            raise damaged(directory / _INDEX, "it has no `weight_map`")
        names = sorted(set(weight_map.values()))
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
        names = [name for name in names if name != SCALES_FILE]
        if "model.safetensors" in names:
            names = ["model.safetensors"]
    paths = [inside(directory, name) for name in names]
    absent = [path for path in paths if not path.is_file()]
    if absent:
        raise missing(absent[0], f"{len(absent)} of {len(paths)} weight files are not there")
    if not paths:
        raise _no_weights(directory)
    return paths


def _no_weights(directory: Path) -> ModelError:
    pickles = [path.name for pattern in _PICKLES for path in directory.glob(pattern)]
    return (
        refuse_pickle(directory / pickles[0])
        if pickles
        else foreign(directory, "it has no .safetensors files")
    )


def refuse_pickle(path: Path) -> ModelError:
    """Pickled weights run code when they are read."""
    return ModelError(
        f"`{path}` is a pickle, which may run any code when read; halogen never opens one",
        code="HRT-2010",
        fix="take the model's safetensors, or convert it in a place you can afford to lose",
    )
