"""Locked memory within and beyond the limit; a backend that idles costs no CPU time."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from ggml_cases import backend_for, quant_weight

from halogen_core.spi import BackendOptions, ConfigError, WeightRole
from halogen_cpu_ggml.settings import Settings

LIMITED = """
import ctypes, resource, sys
import numpy as np
from halogen_core.spi import BackendOptions, ConfigError, KVSpec, QuantTensor, WeightRole
from halogen_cpu_ggml.backend import create

limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
# CAP_IPC_LOCK (bit 14), which root has, locks beyond any limit; version 3 of the interface: two sets of three words
libc = ctypes.CDLL(None, use_errno=True)
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
sets[0] &= ~(1 << 14)
assert libc.capset(header, sets) == 0
backend = create(BackendOptions(threads=1, extra={"mlock": sys.argv[1], "kernels": sys.argv[3]}))
rows = int(sys.argv[4])
data = np.zeros(rows * 2048 * 4, np.uint8)
try:
    backend.pack([QuantTensor(format="F32", shape=(rows, 2048), data=data)], WeightRole.LINEAR)
    layout = backend.kv_layout(KVSpec(num_layers=1, num_kv_heads=1, head_dim=64))
    backend.kv_alloc(layout, 64)
    print("packed", int(backend.counters().gauges["locked_bytes"]), backend.locks.refusal)
except ConfigError as exc:
    print(exc.code, exc)
"""


def limited(choice, limit, kernels="auto", rows=2048):
    command = [sys.executable, "-c", LIMITED, choice, str(limit), kernels, str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_memory_is_locked_where_the_limit_allows_it():
    # small enough for the 8 MiB that many systems allow anybody
    word, locked, *refusal = limited("on", 6 << 20, "off", rows=256).split()
    assert (word, refusal) == ("packed", [])
    assert int(locked) >= 2 << 20


def test_what_may_not_be_locked_is_told_with_the_arithmetic():
    told = limited("on", 1 << 20)
    assert told.startswith("HRT-3613")
    assert "cannot lock 16.0 MiB more" in told
    assert "RLIMIT_MEMLOCK is 1.0 MiB, 0.0 MiB of it in use, 16.0 MiB or more are needed" in told
    auto = limited("auto", 1 << 20)
    assert auto.startswith("packed 0 cannot lock 16.0 MiB more")
    assert limited("off", 1 << 20).split() == ["packed", "0"]


def test_the_choice_is_checked():
    with pytest.raises(ConfigError, match="mlock"):
        Settings.of(BackendOptions(extra={"mlock": "perhaps"}))


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_idling_costs_nothing(mode):
    """Threads that have computed sleep; 10 ms of a second is the clock's own grain."""
    import numpy as np

    backend = backend_for(mode, threads=2)
    tensor, _ = quant_weight(np.random.default_rng(0), "Q8_0", 512, 512)
    weight = backend.pack([tensor], WeightRole.LINEAR)
    backend.ops.linear(backend.upload(np.ones((64, 512), np.float32)), weight)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.01


RESIDENT = """
import re, sys
from halogen_core.loader import open_model
from halogen_core.models import Decoder, config_of, kv_spec
from halogen_core.spi import BackendOptions
from halogen_cpu_ggml.backend import create
sys.path.insert(0, sys.argv[2])
from ggml_cases import step_batch
import numpy as np

def resident():
    entries = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read())
    own = [e for e in entries if sys.argv[1] in e.partition("\\n")[0]]
    return sum(int(re.search(r"Rss: +(\\d+)", e)[1]) for e in own)

checkpoint = open_model(sys.argv[1])
backend = create(BackendOptions(threads=1))
config = config_of(checkpoint)
decoder = Decoder.load(config, checkpoint, backend)
kv = backend.kv_alloc(backend.kv_layout(kv_spec(config, dtype="f16", block_size=16)), 4)
batch = step_batch([(3, 3)], np.array([[1]], np.int32), 16)
step = lambda meta: backend.ops.sample(decoder.logits(backend.ops, meta, kv), meta)
backend.capture(step, batch)(batch)
print(resident(), "torch" in sys.modules)
"""


def test_a_step_leaves_nothing_of_the_file_resident_and_needs_no_torch(smollm2_path):
    """All weights are in tiles; the table's pages are given back."""
    command = [sys.executable, "-c", RESIDENT, str(smollm2_path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    kib, torch = done.stdout.split()
    assert int(kib) < 1024
    assert torch == "False"
