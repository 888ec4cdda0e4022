"""The prefix cache on disk: what `halogen kv dump`, `halogen kv load` and a drain call."""

from __future__ import annotations

from pathlib import Path

import attrs

from halogen_core.kv.block_pool import BlockPool
from halogen_core.kv.snapshot import Identity, dump, load
from halogen_core.kv.tiers import KVMover


@attrs.frozen(eq=False)
class Snapshots:
    """Snapshots of one pool, valid for one identity."""

    blocks: BlockPool
    mover: KVMover
    identity: Identity

    def save(self, path: Path) -> int:
        """Write the cached blocks; their number."""
        return dump(self.blocks, self.mover, path, self.identity)

    def load(self, path: Path) -> int:
        """Fill free blocks from a file; how many. Raises `SnapshotRefused` for a foreign one."""
        return load(self.blocks, self.mover, path, self.identity)
