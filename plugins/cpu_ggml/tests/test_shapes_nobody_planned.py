"""Random small models, odd in every size: the answer of plain torch, or a typed refusal; never an abort.

ggml ends the process on an assertion, so each run is a process of its own.
"""

import subprocess
import sys
from pathlib import Path

import emulation
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halogen_core.spi import HalogenError
from halogen_cpu_ggml.settings import kernel_choices

FORMATS = (None, "F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K")


@st.composite
def models(draw):
    """Shapes as `tiny_checkpoint` takes them, and what the step is."""
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    kind = draw(st.sampled_from(["llama", "llama-sinks", "llama-moe", "qwen2", "qwen3", "gemma3"]))
    return {
        "model": kind,
        "quant": draw(st.sampled_from(FORMATS)),
        "changes": {
            "layers": draw(st.integers(1, 2)),
            "hidden": draw(st.sampled_from([32, 36, 50, 64, 256])),
            "inner": draw(st.sampled_from([1, 24, 33, 64, 256])),
            "kv_heads": kv_heads,
            "heads": kv_heads * draw(st.sampled_from([1, 2, 7])),
            "head_dim": draw(st.sampled_from([2, 6, 32, 80, 96, 130])),
            "vocab": draw(st.sampled_from([1, 2, 31, 97, 1009])),
            "window": draw(st.sampled_from([0, 1, 5])),
        },
        "extra": draw(st.sampled_from([{}, {"final_logit_softcapping": 5.0}])),
        "lengths": draw(st.lists(st.sampled_from([1, 2, 17, 40]), min_size=1, max_size=4)),
        "kv_dtype": draw(st.sampled_from(["f16", "f32", "q8_0", "bf16"])),
    }


def compare(backend, reference, case):
    """Logits of one step on both; refusals are fine if both kinds are typed."""
    import numpy as np
    from ggml_cases import shuffled_tables, step_batch

    from halogen_core.models import Decoder, config_of, kv_spec
    from halogen_core.spi.testing import TINY_MODELS, tiny_checkpoint

    extra = {**TINY_MODELS[case["model"]].extra, **case["extra"]}
    checkpoint = tiny_checkpoint(
        case["model"], seed=1, quant=case["quant"], extra=extra, **case["changes"]
    )
    sequences = [(n, n) for n in case["lengths"]]
    rng = np.random.default_rng(0)
    tables, blocks = shuffled_tables(rng, sequences, 16)
    ids = rng.integers(0, case["changes"]["vocab"], sum(case["lengths"]))
    batch = step_batch(sequences, tables, 16, ids)
    answers, picked = [], None
    for each in (reference, backend):
        config = config_of(checkpoint)
        decoder = Decoder.load(config, checkpoint, each)
        spec = kv_spec(config, dtype=case["kv_dtype"], block_size=16)
        kv = each.kv_alloc(each.kv_layout(spec), blocks)
        logits = decoder.logits(each.ops, each.upload_step(batch), kv)
        answers.append(each.download(logits).astype(np.float64))
        picked = _replayed(each, decoder, kv, batch)
    want, got = answers
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(picked, got.argmax(-1))
    size = max(np.sqrt((want**2).mean()), 0.5)
    assert np.sqrt(((got - want) ** 2).mean()) < 0.25 * size, (got, want)


def _replayed(backend, decoder, kv, batch):
    """Tokens of the same step, captured; None: the backend captures none."""

    def step(meta):
        return backend.ops.sample(decoder.logits(backend.ops, meta, kv), meta)

    replay = backend.capture(step, batch)
    return None if replay is None else backend.download(replay(batch).token_ids)


def fuzz(mode):
    """What the child does: run many, raise on the first that is neither right nor refused."""
    import torch
    from ggml_cases import backend_for

    from halogen_core.spi import TorchBackend

    torch.set_num_threads(1)
    backend, reference = backend_for(mode, 1), TorchBackend()
    ran = []
    emulated = mode not in kernel_choices()

    @settings(
        max_examples=15 if emulated else 60,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(models())
    def run(case):
        print(case, file=sys.stderr, flush=True)
        try:
            compare(backend, reference, case)
            ran.append(True)
        except HalogenError:
            ran.append(False)

    run()
    backend.close()
    print(sum(ran), len(ran))


@pytest.mark.parametrize("mode", ["auto", *emulation.modes(), "off"])
def test_random_models_are_right_or_refused(mode):
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); import {Path(__file__).stem} as t; t.fuzz({mode!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    right, ran = (int(word) for word in done.stdout.split()[-2:])
    assert right > ran // 2
