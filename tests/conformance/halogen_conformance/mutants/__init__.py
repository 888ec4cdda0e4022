"""Backends broken on purpose, one defect each: what the suite must kill, and at which level."""

TOPICS = (
    "attending",
    "storing",
    "pointwise",
    "products",
    "eight_bit",
    "four_bits",
    "int8",
    "float8",
    "drawing",
    "promises",
    "blocks",
    "memory",
    "models",
    "honesty",
)
"""Modules of this package; each registers its mutants on import."""
