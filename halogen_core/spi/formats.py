"""Weight formats by name: how many elements a block holds and how many bytes it takes."""

from __future__ import annotations

import attrs


@attrs.frozen
class WeightFormat:
    """A storage format; `block` elements along the last axis take `bytes` bytes."""

    name: str
    block: int
    bytes: int
    ggml_type: int | None = None
    """ggml's number for it, where GGUF files hold it."""

    def nbytes(self, elements: int) -> int:
        """Bytes of `elements` elements (a multiple of `block`)."""
        return elements // self.block * self.bytes


FORMATS: dict[str, WeightFormat] = {
    f.name: f
    for f in (
        WeightFormat("F32", 1, 4, 0),
        WeightFormat("F16", 1, 2, 1),
        WeightFormat("BF16", 1, 2, 30),
        WeightFormat("Q4_0", 32, 18, 2),
        WeightFormat("Q4_1", 32, 20, 3),
        WeightFormat("Q5_0", 32, 22, 6),
        WeightFormat("Q5_1", 32, 24, 7),
        WeightFormat("Q8_0", 32, 34, 8),
        WeightFormat("Q4_K", 256, 144, 12),
        WeightFormat("Q5_K", 256, 176, 13),
        WeightFormat("Q6_K", 256, 210, 14),
    )
}
