"""How L1 cases are made: one question, asked in every compute dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs

from halogen_conformance.bench import Bench
from halogen_conformance.case import Case, Opening
from halogen_core.spi import OpSignature

DTYPES = ("f32", "f16", "bf16")


def op_cases(
    op: str,
    name: str,
    why: str,
    run: Callable[[Bench], None],
    *,
    signature: OpSignature | None = None,
    column: str = "",
    dtypes: Sequence[str] = DTYPES,
    required: bool = True,
) -> Iterator[Case]:
    """`run` as a case `L1/op/name@dtype` for each dtype."""
    signature = signature or OpSignature(op=op)
    for dtype in dtypes:
        yield Case(
            id=f"L1/{op}/{name}@{dtype}",
            topic=op,
            why=why,
            run=run,
            column=column or dtype,
            opening=Opening(dtype=dtype),
            signature=attrs.evolve(signature, op=op, dtype=dtype),
            required=required,
        )
