"""Compiled kernels on disk: kept per Triton version and arch, checked when read, counted.

Triton's own cache has one weakness: of an entry it looks only whether its files exist, so a
truncated binary fails at every start. Here each file has a checksum beside it; an entry that does
not agree with its checksums counts as missing, and Triton compiles it again.

The state lives in Triton's `knobs`, which are one per process as its cache is.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import triton
from triton import knobs
from triton.runtime.cache import FileCacheManager

from halogen_core.spi import ConfigError, KernelCounts

log = logging.getLogger(__name__)

SUFFIX = ".sha256"


@attrs.define(eq=False)
class KernelWatch:
    """Triton's compilation listener: counts, and passes on to the listener before it."""

    before: Any = None
    compiled: int = 0
    loaded: int = 0
    microseconds: int = 0
    damaged: set[str] = attrs.field(factory=set)
    """Folders of cache entries that were refused."""
    folder: str = ""
    """Where `keep` put the cache; empty: it did not."""

    def __call__(self, *, times: Any, cache_hit: bool, **about: Any) -> None:
        if cache_hit:
            self.loaded += 1
        else:
            self.compiled += 1
            self.microseconds += times.total
        if self.before is not None:
            self.before(times=times, cache_hit=cache_hit, **about)

    def counts(self) -> KernelCounts:
        """So far, in this process."""
        return KernelCounts(
            compiled=self.compiled,
            loaded=self.loaded,
            rebuilt=len(self.damaged),
            seconds=self.microseconds / 1e6,
            cache=str(knobs.cache.dir or ""),
        )


class CheckedCache(FileCacheManager):  # type: ignore[misc]
    """Triton's file cache with a checksum beside every file; raises `ConfigError` (HRT-3416)."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        with writing(knobs.cache.dir):
            super().__init__(key, override, dump)

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        raw = data if isinstance(data, bytes) else str(data).encode()
        with writing(self.cache_dir):
            path: str = super().put(data, filename, binary)
            aside = Path(f"{path}.{os.getpid()}")
            aside.write_text(hashlib.sha256(raw).hexdigest())
            aside.replace(path + SUFFIX)
        return path

    def get_file(self, filename: str) -> str | None:
        path: str | None = super().get_file(filename)
        return path if path is None or self._intact(path) else None

    def get_group(self, filename: str) -> dict[str, str] | None:
        listing = self._make_path(f"__grp__{filename}")
        if not os.path.exists(listing) or not self._intact(listing):
            return None
        group: dict[str, str] | None = super().get_group(filename)
        if group is None:
            self._refuse(listing, "a file of it is gone")
            return None
        return group if all(self._intact(path) for path in group.values()) else None

    def _intact(self, path: str) -> bool:
        try:
            told = Path(path + SUFFIX).read_text()
        except OSError:
            return False  # written by somebody else, or half written: nothing to complain about
        if told == hashlib.sha256(Path(path).read_bytes()).hexdigest():
            return True
        self._refuse(path, "it does not agree with its checksum")
        return False

    def _refuse(self, path: str, why: str) -> None:
        watch = knobs.compilation.listener
        if isinstance(watch, KernelWatch) and self.cache_dir not in watch.damaged:
            watch.damaged.add(self.cache_dir)
            log.warning("kernel cache entry `%s` is damaged (%s); compiling anew", path, why)


@contextlib.contextmanager
def writing(place: Any) -> Iterator[None]:
    """Tell a folder that cannot be written by its name and what to do."""
    try:
        yield
    except OSError as exc:
        raise ConfigError(
            f"compiled kernels cannot be kept in `{place}`: {exc}",
            code="HRT-3416",
            fix="set --cache-dir to a folder that this user may write, or free space there",
        ) from exc


def watch() -> KernelWatch:
    """The process's counter of compilations, installed once."""
    current = knobs.compilation.listener
    if not isinstance(current, KernelWatch):
        current = knobs.compilation.listener = KernelWatch(current)
    return current


def keep(cache_dir: str | None, arch: str) -> KernelWatch:
    """Keep compiled kernels below `cache_dir` and count; TRITON_CACHE_DIR wins where it is set.

    Raises `ConfigError` (HRT-3416) when the folder cannot be made.
    """
    own = watch()
    # what an earlier backend of this process set lies in the environment too, and is no user's wish
    if cache_dir is not None and os.environ.get("TRITON_CACHE_DIR", own.folder) == own.folder:
        place = folder(cache_dir, arch)
        # now and not within the first step; a folder that is there may be complete and read-only
        with writing(place):
            place.mkdir(parents=True, exist_ok=True)
        own.folder = knobs.cache.dir = str(place)
    knobs.cache.manager_class = CheckedCache
    # part of the cache key, and its default changes with Triton 3.10
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    return own


def folder(cache_dir: str, arch: str) -> Path:
    """Where the kernels of an arch are kept: what one Triton compiled, no other ever loads."""
    return Path(cache_dir) / "kernels" / f"triton-{triton.__version__}" / arch
