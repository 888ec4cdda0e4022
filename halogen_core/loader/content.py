"""A cheap, stable identity of weights."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from halogen_core.spi.arrays import Bytes

_SAMPLE_BYTES = 256


def content_hash(files: Iterable[tuple[Bytes, Iterable[Bytes]]]) -> str:
    """128-bit BLAKE2b, in hex, over each file's header and samples of its tensors.

    Of every tensor the first, middle and last 256 bytes count: equal names, shapes, metadata and
    samples are taken for equal weights, so that an id costs milliseconds however large the file.
    A tampered file is the checksum's business (`halogen pull`), not this one's.
    """
    digest = blake2b(digest_size=16)
    for header, tensors in files:
        digest.update(header.data)
        for data in tensors:
            for start in (0, len(data) // 2, max(0, len(data) - _SAMPLE_BYTES)):
                digest.update(data[start : start + _SAMPLE_BYTES].data)
    return digest.hexdigest()
