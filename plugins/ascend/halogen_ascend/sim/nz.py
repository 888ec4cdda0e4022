"""FRACTAL_NZ: a matrix as a column of 16 x 32-byte tiles, the layout that the cube reads.

[K, N] becomes [N / c0, K / 16, 16, c0] with c0 = 32 bytes / itemsize; both sides are padded to
whole fractals and the padding is paid for in HBM.
"""

from __future__ import annotations

import torch

ROWS = 16


def c0(itemsize: int) -> int:
    """Elements in a fractal's 32-byte row."""
    return 32 // itemsize


def nz_shape(k: int, n: int, itemsize: int) -> tuple[int, int, int, int]:
    """Shape of a [k, n] matrix in NZ."""
    width = c0(itemsize)
    return -(-n // width), -(-k // ROWS), ROWS, width


def to_nz(matrix: torch.Tensor) -> torch.Tensor:
    """[..., K, N] to [..., N / c0, K / 16, 16, c0], zero-padded."""
    *lead, k, n = matrix.shape
    n1, k1, rows, width = nz_shape(k, n, matrix.element_size())
    padded = torch.zeros(*lead, k1 * rows, n1 * width, dtype=matrix.dtype)
    padded[..., :k, :n] = matrix
    return padded.reshape(*lead, k1, rows, n1, width).movedim(-2, -4).contiguous()


def from_nz(tiles: torch.Tensor, k: int, n: int) -> torch.Tensor:
    """The [..., K, N] matrix of NZ tiles, padding dropped."""
    *lead, n1, k1, rows, width = tiles.shape
    wide = tiles.movedim(-4, -2).reshape(*lead, k1 * rows, n1 * width)
    return wide[..., :k, :n]
