"""What a backend may be able to do beside `Backend`; the core asks by `isinstance`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import attrs
from numpy.typing import NDArray

from halogen_core.spi.operations import OpSignature, Support
from halogen_core.spi.step import Sampled


@attrs.frozen(kw_only=True)
class KernelCounts:
    """What a compiler did in this process."""

    compiled: int = 0
    loaded: int = 0
    """Taken from the cache on disk."""
    rebuilt: int = 0
    """Of `compiled`: because the cache entry was damaged."""
    seconds: float = 0.0
    """Spent compiling."""
    cache: str = ""
    """Where compiled kernels are kept; empty: nowhere."""


@runtime_checkable
class CompilesKernels(Protocol):
    """A backend whose kernels are compiled when they are first met, or ahead of time."""

    def kernel_counts(self) -> KernelCounts: ...


@runtime_checkable
class Adjustable(Protocol):
    """A backend with settings that change how it computes, never what."""

    def adjustable(self) -> Mapping[str, str]:
        """The settings and their values now."""
        ...

    def adjust(self, key: str, value: str) -> None:
        """Set one from the next step on; raises `ConfigError` for a key or value it has not."""
        ...

    def remember(self, key: str, value: str) -> str:
        """Make it the default of later starts on this machine; returns where that is kept."""
        ...


@runtime_checkable
class Tunes(Protocol):
    """A backend that can measure launch shapes and keep the best for later starts."""

    def tune(self, rehearse: Callable[[], None], progress: Callable[[str], None]) -> str:
        """Measure every class of shape that `rehearse` meets; returns where it was saved."""
        ...


@runtime_checkable
class RunsAhead(Protocol):
    """A backend that queues a step and returns, so that the next is queued while it still runs.

    Its `upload_step` and its captured steps take a batch whose tokens are `carried`: picked by the
    step queued before, still on the device. Work runs in the order in which it was queued. What may
    be tried again (`Transient`) is raised by the call that queues the step, never by the wait.
    """

    def fetch(self, sampled: Sampled[Any]) -> Callable[[], Sampled[NDArray[Any]]]:
        """Queue the copy of a step's tokens to the host; the call returned waits and gives them.

        `sampled` may be written over by the next step once this has returned.
        """
        ...


@attrs.frozen(kw_only=True)
class KernelPack:
    """An op of a kernel pack, loaded: what `OpImplementation` names."""

    op: str
    name: str
    call: Callable[..., Any]
    supports: Callable[[OpSignature], Support]


@runtime_checkable
class TakesKernels(Protocol):
    """A backend whose ops a kernel pack may serve; what the pack denies stays its own."""

    def install(self, pack: KernelPack) -> None: ...
