"""What was measured on this machine: launch rules and the flash threshold, kept for later starts.

One JSON file per arch and Triton version, beside the compiled kernels. Its rules come before those
that are shipped. A file that is damaged, or of another arch or Triton, is refused with a warning
and written anew by the next `halogen selftest --tune`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import triton

from halogen_triton.kernel_cache import folder

log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Tuned:
    """Measurements of one arch; `kernels` are rules in the form of the shipped tables."""

    kernels: Mapping[str, Sequence[Mapping[str, Any]]] = attrs.field(factory=dict)
    flash_threshold: int | None = None


def path_of(cache_dir: str, arch: str) -> Path:
    """Where they are kept."""
    return folder(cache_dir, arch) / "tuned.json"


def read(cache_dir: str | None, arch: str) -> Tuned:
    """What was measured for `arch` with this Triton; empty where there is nothing to trust."""
    if cache_dir is None or not (path := path_of(cache_dir, arch)).exists():
        return Tuned()
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        told = (stored["arch"], stored["triton"], stored["sha256"])
        wanted = (arch, triton.__version__, _digest(stored["measured"]))
        if told != wanted:
            raise ValueError(f"it says {told}, expected {wanted}")
        return Tuned(**stored["measured"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        log.warning(
            "launch table `%s` is refused (%s); shipped launches are used until"
            " `halogen selftest --tune` writes it anew",
            path,
            exc,
        )
        return Tuned()


def write(cache_dir: str, arch: str, tuned: Tuned) -> Path:
    """Keep `tuned`; replaces the file at once, never half."""
    path = path_of(cache_dir, arch)
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = attrs.asdict(tuned)
    data = {
        "arch": arch,
        "triton": triton.__version__,
        "sha256": _digest(measured),
        "measured": measured,
    }
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)
    return path


def _digest(measured: Any) -> str:
    return hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()
