"""The team's life, and memory that weights share."""

from itertools import pairwise

import numpy as np

from halogen_cpu_ggml import native
from halogen_cpu_ggml.tiles import SLAB, Slabs


def test_a_program_runs_on_as_many_threads_as_asked():
    kernels = native.kernels("auto")
    crew = native.Crew.start(kernels, 3, [])
    assert kernels.library.hx_team_threads(crew.address) == 3
    crew.stop()
    crew.stop()


def test_small_weights_share_slabs_without_overlap():
    slabs, rng = Slabs(), np.random.default_rng(0)
    taken = [slabs.take(int(n)) for n in rng.integers(1, SLAB // 6, 40)]
    taken.append(slabs.take(SLAB))
    spans = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in taken)
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert not any(a.any() for a in taken)
