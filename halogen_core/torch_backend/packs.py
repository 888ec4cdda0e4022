"""Serving an op by a kernel pack where it can, by the backend's own op where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from halogen_core.errors import UnsupportedOp
from halogen_core.spi.abilities import KernelPack
from halogen_core.spi.memory import KVCache
from halogen_core.spi.operations import (
    Activation,
    AttentionSpec,
    MoESpec,
    OpSignature,
    SupportLevel,
)

KINDS = (AttentionSpec, MoESpec, KVCache, Activation)


def serve(pack: KernelPack, own: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    """`pack.call` for calls that `pack.supports`, `own` for the others.

    The question is asked once per kind of call; a pack may still raise `UnsupportedOp` for what a
    signature does not tell, and is not asked again for that kind.
    """
    answers: dict[tuple[Any, ...], tuple[bool, tuple[Any, ...]]] = {}

    def call(*args: Any, **named: Any) -> Any:
        about = tuple(a for a in (*args, *named.values()) if isinstance(a, KINDS))
        key = (*map(id, about), *(name for name, value in named.items() if value is not None))
        if key not in answers:
            level = pack.supports(signature_of(pack.op, dtype, about)).level
            # what identities stand for is kept, or they could come to mean something else
            answers[key] = (level is SupportLevel.NATIVE, about)
        if not answers[key][0]:
            return own(*args, **named)
        try:
            return pack.call(*args, **named)
        except UnsupportedOp:
            answers[key] = (False, about)
            return own(*args, **named)

    return call


def signature_of(op: str, dtype: str, about: tuple[Any, ...]) -> OpSignature:
    """The value-free question that these arguments make."""
    found: dict[str, Any] = {}
    for value in about:
        if isinstance(value, AttentionSpec):
            found["attention"] = value
        elif isinstance(value, MoESpec):
            found["moe"] = value
        elif isinstance(value, Activation):
            found["activation"] = value
        else:
            spec = value.layout.spec
            found["kv_dtype"], found["block_size"] = spec.dtype, spec.block_size
    return OpSignature(op=op, dtype=dtype, **found)
