"""Whose cached prefixes a sequence may share: typed, length-prefixed parts, never concatenation."""

from __future__ import annotations


def cache_salt(*, tenant: str = "", adapter: str = "", extra: bytes = b"") -> bytes:
    """A salt in which a tenant named like an adapter still differs from it.

    Plain concatenation would let `tenant="ab"` meet `tenant="a", adapter="b"`.
    """
    parts = ((b"t", tenant.encode()), (b"a", adapter.encode()), (b"x", extra))
    return b"".join(tag + len(part).to_bytes(4, "little") + part for tag, part in parts if part)
