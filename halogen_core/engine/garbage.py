"""Python's cycle collector, kept from walking the whole heap between two steps.

A full collection visits every object there is: with a million cached blocks it takes three
seconds. Here what survives a collection is set aside (`gc.freeze`), so that no collection
ever sees more than a few hundred steps' worth. Reference counts free what was set aside as
usual; only cycles among it would stay for good, and requests make none (a test counts them).
"""

from __future__ import annotations

import ctypes
import gc
import sys

EVERY_STEPS = 256


def none_while_starting() -> None:
    """Collect nothing while modules are imported and a model is read: almost all of it stays."""
    gc.disable()


def set_aside() -> None:
    """The start is over: keep what there is, collect what comes."""
    gc.freeze()
    gc.enable()


def give_back() -> None:
    """Hand the system what malloc keeps of freed memory, where that is glibc's.

    A tokenizer of 262,144 pieces leaves 40 MB behind while it is built.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class SetAside:
    """For a process whose only work is the engine: the collector belongs to all of it."""

    def __init__(self) -> None:
        set_aside()

    def after_step(self, num_steps: int) -> None:
        """Called after every step; now and then collects what came since and keeps the rest."""
        if num_steps % EVERY_STEPS == 0:
            # the old too: cycles of a compiler outlive young collections, 2 MB for each kernel
            gc.collect()
            gc.freeze()
