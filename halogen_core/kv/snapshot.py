"""The prefix cache in a file, across restarts: written whole or not at all, believed only intact.

Layout: magic, u64 header length, JSON header, tokens, block rows, then a 32-byte BLAKE2b of all
before it. A file of another model, layout or build, or with one wrong bit, is refused before
anything of the cache is touched (C48, T16).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import numpy as np

from halogen_core.errors import HalogenError
from halogen_core.kv.block_pool import BlockPool
from halogen_core.kv.ledger import nodes_of
from halogen_core.kv.node import NOWHERE, Node
from halogen_core.kv.tiers import KVMover
from halogen_core.kv.tree import TOKEN_BYTES

MAGIC = b"HALOGENKV1\n"
DIGEST_BYTES = 32
CHUNK_BLOCKS = 64


class SnapshotRefused(HalogenError):
    """The file is damaged or belongs to something else; the cache is as it was."""

    default_code = "HRT-3310"


@attrs.frozen(kw_only=True)
class Identity:
    """What a snapshot is valid for: all must be equal."""

    model: str
    """Content hash of the weights."""
    layout: str
    """`KVLayout.id` and KV type."""
    build: str
    """Version of halogen and of the backend."""


def dump(pool: BlockPool, mover: KVMover, path: Path, identity: Identity) -> int:
    """Write all cached full blocks on the device; returns their number. Atomic, mode 0600."""
    full = pool.block_size * TOKEN_BYTES
    nodes = [n for n in nodes_of(pool) if n.block != NOWHERE and len(n.tokens) == full]
    nodes = _with_parents(nodes)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            _write(file, pool, mover, nodes, identity)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as exc:
        raise HalogenError(
            f"the KV snapshot `{path}` cannot be written: {exc.strerror}",
            code="HRT-3311",
            fix="check the directory, its rights and free space",
        ) from exc
    finally:
        temporary.unlink(missing_ok=True)
    return len(nodes)


def load(pool: BlockPool, mover: KVMover, path: Path, identity: Identity) -> int:
    """Fill free blocks from a snapshot; returns how many. Nothing that is cached is evicted.

    Raises `SnapshotRefused`; the cache is unharmed then.
    """
    try:
        with path.open("rb") as file:
            header, start = _header(file, path)
            _check_identity(header, identity, pool, mover, path)
            _check_intact(file, header, start, path)
            return _restore(file, header, start, pool, mover)
    except OSError as exc:
        raise SnapshotRefused(f"the KV snapshot `{path}` cannot be read: {exc.strerror}") from exc


# -- writing


def _with_parents(nodes: Sequence[Node]) -> list[Node]:
    """Those whose whole prefix is among them, parents first."""
    found: dict[Node, None] = {}
    for node in sorted(nodes, key=lambda n: n.depth):
        assert node.parent is not None
        if node.parent.is_root or node.parent in found:
            found[node] = None
    return list(found)


def _write(
    file: BinaryIO, pool: BlockPool, mover: KVMover, nodes: Sequence[Node], identity: Identity
) -> None:
    index = {node: i for i, node in enumerate(nodes)}
    salts = {salt: i for i, salt in enumerate(pool.tree.roots)}
    parents = []
    for node in nodes:
        assert node.parent is not None
        root = node.parent.is_root
        parents.append(-1 - salts[node.parent.tokens] if root else index[node.parent])
    header = {
        **attrs.asdict(identity),
        "block_size": pool.block_size,
        "bytes_per_block": mover.bytes_per_block,
        "salts": [salt.hex() for salt in salts],
        "parents": parents,
    }
    text = json.dumps(header).encode()
    digest = blake2b(digest_size=DIGEST_BYTES)

    def put(data: bytes) -> None:
        digest.update(data)
        file.write(data)

    put(MAGIC + len(text).to_bytes(8, "little") + text)
    put(b"".join(node.tokens for node in nodes))
    for at in range(0, len(nodes), CHUNK_BLOCKS):
        blocks = [node.block for node in nodes[at : at + CHUNK_BLOCKS]]
        put(np.ascontiguousarray(mover.export_blocks(blocks)).tobytes())
    file.write(digest.digest())


# -- reading


def _header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], int]:
    start = len(MAGIC) + 8
    begin = file.read(start)
    length = int.from_bytes(begin[len(MAGIC) :], "little")
    if begin[: len(MAGIC)] != MAGIC or start + length > path.stat().st_size:
        raise SnapshotRefused(f"`{path}` is not a KV snapshot, or is cut off")
    try:
        header = json.loads(file.read(length))
    except ValueError as exc:
        raise SnapshotRefused(f"the header of the KV snapshot `{path}` is damaged") from exc
    if not isinstance(header, dict):
        raise SnapshotRefused(f"the header of the KV snapshot `{path}` is damaged")
    return header, start + length


def _check_identity(
    header: dict[str, Any], identity: Identity, pool: BlockPool, mover: KVMover, path: Path
) -> None:
    ours = {
        **attrs.asdict(identity),
        "block_size": pool.block_size,
        "bytes_per_block": mover.bytes_per_block,
    }
    for name, value in ours.items():
        if header.get(name) != value:
            raise SnapshotRefused(
                f"the KV snapshot `{path}` is of {name} `{header.get(name)}`, this engine of"
                f" `{value}`",
                fix="delete it; the cache fills again by itself",
            )


def _check_intact(file: BinaryIO, header: dict[str, Any], start: int, path: Path) -> None:
    row = header["block_size"] * TOKEN_BYTES + header["bytes_per_block"]
    parents = header.get("parents")
    if not isinstance(parents, list) or not isinstance(header.get("salts"), list):
        raise SnapshotRefused(f"the header of the KV snapshot `{path}` is damaged")
    size = start + len(parents) * row + DIGEST_BYTES
    if path.stat().st_size != size:
        raise SnapshotRefused(f"`{path}` has {path.stat().st_size} bytes and should have {size}")
    digest = blake2b(digest_size=DIGEST_BYTES)
    file.seek(0)
    left = size - DIGEST_BYTES
    while left and (data := file.read(min(left, 1 << 20))):
        digest.update(data)
        left -= len(data)
    if digest.digest() != file.read(DIGEST_BYTES):
        raise SnapshotRefused(f"the KV snapshot `{path}` is damaged: its checksum is wrong")


def _restore(
    file: BinaryIO, header: dict[str, Any], start: int, pool: BlockPool, mover: KVMover
) -> int:
    parents, size = header["parents"], pool.block_size * TOKEN_BYTES
    salts = [bytes.fromhex(salt) for salt in header["salts"]]
    file.seek(start)
    tokens = file.read(len(parents) * size)
    rows = start + len(tokens)
    made: list[Node | None] = []
    fresh: list[tuple[Node, int]] = []
    for i, parent in enumerate(parents):
        above = pool.tree.root(salts[-1 - parent]) if parent < 0 else made[parent]
        node = above and pool.insert(above, tokens[i * size : (i + 1) * size])
        made.append(node)
        if node is not None and node.block != NOWHERE and not node.refs and node.uses == 0:
            fresh.append((node, i))
    for at in range(0, len(fresh), CHUNK_BLOCKS):
        part = fresh[at : at + CHUNK_BLOCKS]
        data = np.empty((len(part), mover.bytes_per_block), np.uint8)
        for row, (_, i) in enumerate(part):
            file.seek(rows + i * mover.bytes_per_block)
            data[row] = np.frombuffer(file.read(mover.bytes_per_block), np.uint8)
        mover.import_blocks([node.block for node, _ in part], data)
    for node, _ in fresh:
        node.uses = 1
    for root in list(pool.tree.roots.values()):
        pool.tree.prune_root(root)
    return len(fresh)
