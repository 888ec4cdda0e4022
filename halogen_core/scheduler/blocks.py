"""What the scheduler asks of a KV block manager (`halogen_core.kv.BlockPool` is one)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class LeaseProtocol(Protocol):
    """A sequence's hold on blocks."""

    blocks: list[int]


class MatchProtocol(Protocol):
    """A cached prefix that was found."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def nodes(self) -> Sequence[Any]: ...

    @property
    def num_idle(self) -> int: ...

    @property
    def num_absent(self) -> int: ...

    def whole_blocks(self, block_size: int) -> MatchProtocol:
        """The same without what needs a copy."""
        ...


class BlockManagerProtocol(Protocol):
    """Blocks by id; leases and matches are its own records, handed back as they came."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def num_available(self) -> int:
        """Blocks that could be had now."""
        ...

    def open(self, owner: int, salt: bytes, *, use_cache: bool, priority: int, session: str) -> Any:
        """A lease without blocks."""
        ...

    def match(self, lease: Any, tokens: Sequence[int]) -> MatchProtocol:
        """The longest cached prefix; changes nothing."""
        ...

    def adopt(self, lease: Any, match: Any) -> bool:
        """Give an empty lease a match's blocks; False and no change if there is no room."""
        ...

    def grow(self, lease: Any, num_tokens: int) -> bool:
        """Room for `num_tokens` in all; False and no change if there is none."""
        ...

    def publish(self, lease: Any, tokens: Sequence[int], num_computed: int) -> None:
        """Let others find the blocks that are full."""
        ...

    def release(
        self, lease: Any, tokens: Sequence[int] = (), num_computed: int = 0, *, back: bool = False
    ) -> None:
        """Give all blocks back; `back`: the sequence will come for them again."""
        ...

    def forget(self, owner: int) -> None:
        """A preempted sequence will not come back."""
        ...

    def audit_idle(self) -> None:
        """Nobody runs: no block may be active; a breach is counted and mended, never raised."""
        ...

    def unpin_oldest(self) -> bool:
        """Make the longest unused pinned session evictable; False if none is pinned."""
        ...

    def begin_step(self) -> None: ...

    def end_step(self) -> None:
        """The step and its copies have run."""
        ...

    def pending_copies(self) -> tuple[tuple[int, int], ...]: ...

    def take_moves(self) -> tuple[int, int]:
        """Blocks moved to and from lower tiers since the last call."""
        ...

    def counters(self) -> Mapping[str, float]: ...

    def gauges(self) -> Mapping[str, float]: ...
