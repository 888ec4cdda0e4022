"""The two int8 formats, for the core's table of weight formats."""

from __future__ import annotations

from halogen_core.spi import WeightFormat

W8A8 = WeightFormat("W8A8", 1, 1)
W8A16 = WeightFormat("W8A16", 1, 1)
