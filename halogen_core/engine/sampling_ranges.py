"""What sampling settings may be, wherever they come from: a request's body or a command line.

Not a number (NaN) fits none of the ranges.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_TOP_K = 2**31 - 1
MAX_LOGIT_BIAS = 1024
"""Tokens with a bias."""

Temperature = Annotated[float, Meta(ge=0, le=100)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_TOP_K)]
"""0 and -1: all tokens."""
TopP = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
"""For presence and frequency."""
LogitBias = Annotated[
    dict[int, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIAS)
]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
