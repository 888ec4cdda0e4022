"""The suite that certifies a halogen backend; `halogen conform` runs it."""

SUITE_VERSION = "1.1"
"""Of the must-pass lists: a change of what is required changes it."""

LEVELS = {
    0: "registration",
    1: "ops",
    2: "KV and memory",
    3: "model parity",
    4: "serving, soak and faults",
    5: "performance honesty",
}
