"""L1's questions to weights with scales beside their codes; `matmul` asks them.

Refused are formats that a backend does not name (FILTERED there, and by L2), never read as others.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from halogen_conformance.oracle.scaled import PLAIN, SCALED, Layout


@attrs.frozen(kw_only=True)
class Question:
    """One product: x [tokens, k] by weights [n, k] for each n of `widths`."""

    name: str
    why: str
    form: str
    tokens: int = 5
    k: int = 256
    widths: tuple[int, ...] = (48,)
    layout: Layout = PLAIN
    loudness: tuple[float, ...] = ()
    """Factors of the first tokens."""


def scaled_questions() -> Iterator[Question]:
    """Each format at both shapes of the others, then the layouts that it may come in."""
    for form in SCALED:
        why = "codes, scales or zeros read in the wrong order; T = 1 takes another path"
        for tokens, k in ((1, 256), (19, 512)):
            yield Question(name=f"T{tokens}-K{k}", why=why, form=form, tokens=tokens, k=k)
    yield from _int4()
    yield Question(
        name="loud-and-silent-tokens",
        why="activations rounded with one scale for all tokens; a token of zeros divides by zero",
        form="W8A8",
        k=512,
        loudness=(1.0, 64.0, 0.0),
    )
    yield from _float8()


def _int4() -> Iterator[Question]:
    layouts = {
        "symmetric": (
            Layout(groups=4, zeros=False),
            "groups of 128 taken for others; without zeros something else than 8 is subtracted",
        ),
        "one-group": (Layout(groups=1), "a scale per output is looked up as if there were groups"),
        "act-order": (Layout(groups=4, shuffled=True), "the order of columns is lost or inverted"),
        "float32-scales": (Layout(groups=4, single=True), "scales of float32 lose their low bits"),
    }
    for name, (layout, why) in layouts.items():
        yield Question(name=name, why=why, form="INT4", k=512, layout=layout)
    yield Question(
        name="three-act-orders",
        why="fused parts that have orders of their own are computed in the first one's",
        form="INT4",
        widths=(48, 16, 16),
        layout=Layout(groups=2, shuffled=True),
    )


def _float8() -> Iterator[Question]:
    layouts = {
        "per-tensor": (Layout(block=(0, 0), single=True), "the one scale is lost or inverted"),
        "per-channel": (Layout(block=(1, 0), single=True), "an output has another one's scale"),
        "no-scale": (Layout(block=None), "a weight that needs no scale is refused or scaled"),
        "ragged-blocks": (
            Layout(block=(64, 128), single=True),
            "sides of a block exchanged; the last blocks, which are cut, have a neighbour's scale",
        ),
        "subnormal": (Layout(subnormal=True), "codes of exponent 0 become zero or twice as much"),
    }
    for name, (layout, why) in layouts.items():
        yield Question(name=name, why=why, form="F8_E4M3", k=320, widths=(200,), layout=layout)
    for name in ("per-channel", "subnormal"):
        layout, why = layouts[name]
        yield Question(name=name, why=why, form="F8_E5M2", k=320, widths=(200,), layout=layout)
