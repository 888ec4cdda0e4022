"""What backends are asked, a module per topic; each has `cases()`."""

TOPICS = (
    "registration",
    "elementwise",
    "matmul",
    "attending",
    "sampling",
    "kv",
    "arrays",
    "memory",
    "model",
    "ahead",
    "serving",
    "honesty",
)
"""Modules of this package, in running order within a level."""
