"""Field reports of other engines that need no hardware; docs/reference/ascend-coverage.md has all."""

import ast
import random
import subprocess
import sys
from pathlib import Path

import attrs
import numpy as np
import pytest
from ascend_steps import BLOCK, Config, Decoder, f32, open_sim, step

from halogen_ascend.errors import OutOfRange
from halogen_ascend.sim.attention import check_lengths
from halogen_ascend.weights.quantize import quantize_rows, signal_to_noise
from halogen_core.kv.block_pool import BlockPool
from halogen_core.spi import AttentionSpec, OpSignature, SupportLevel, WeightRole


def test_one_ends_as_another_prefills(backend):
    """State kept from the step before gives negative query lengths elsewhere."""
    decoder = Decoder(backend, blocks=12)
    first, second = [3] * 20, [5] * 140
    decoder.logits(step([(first, 0, [0])]))
    mixed = step([([7], 20, [0]), (second[:130], 0, [1, 2])])
    both = decoder.logits(mixed)
    after = decoder.logits(step([(second[130:], 130, [1, 2])]))
    assert np.array_equal(decoder.logits(step([([7], 20, [0])]))[0], both[0])
    assert np.array_equal(decoder.logits(step([(second, 0, [4, 5])]))[0], after[0])


def test_ten_thousand_steps_of_coming_and_going_keep_every_list():
    rng, live, free = random.Random(0), {}, list(range(400))
    for turn in range(10_000):
        if rng.random() < 0.3 and len(live) < 16 and len(free) > 8:
            live[turn] = [0, [free.pop() for _ in range(4)]]
        if rng.random() < 0.2 and live:
            free += live.pop(rng.choice(list(live)))[1]
        items = []
        for state in live.values():
            count = min(rng.choice((1, 1, 1, 7, 60)), 4 * BLOCK - state[0])
            if count:
                items.append(([1] * count, state[0], state[1]))
                state[0] += count
        if not items:
            continue
        batch = step(items)
        check_lengths(batch)
        if turn % 500 == 0:
            short = attrs.evolve(batch, seq_lens=batch.seq_lens[:-1])
            with pytest.raises(OutOfRange, match="block tables"):
                check_lengths(short)


@pytest.mark.parametrize("dim", [80, 256])
def test_head_dims_that_cannot_be_fused_run_composed_and_are_counted(backend, dim):
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=dim, scale=1.0)
    said = backend.supports(OpSignature(op="attention", dtype="f16", attention=spec))
    assert said.level is SupportLevel.FALLBACK
    assert str(dim) in said.reasons[0]
    decoder = Decoder(backend, Config(layers=1, dim=dim), blocks=4)
    decoder.logits(step([([1] * 4, 0, [0])]))
    assert backend.counters().counters["fallback_attention_calls"] == 1
    many = attrs.evolve(spec, num_heads=130, num_kv_heads=1)
    said = backend.supports(OpSignature(op="attention", dtype="f16", attention=many))
    assert said.level is SupportLevel.NO


def test_prefix_hits_reach_into_a_block_of_128(backend):
    """A block is 128 tokens because the part wants it; a shared prefix is 200 all the same."""
    decoder = Decoder(backend, blocks=12)
    pool = BlockPool(12, backend.capabilities().kv_block_sizes[0])
    shared, mine = [9] * 200, [4, 5, 6]
    lease = pool.open(1)
    pool.grow(lease, 203)
    decoder.logits(step([([*shared, 1, 2, 3], 0, lease.blocks)]))
    pool.release(lease, [*shared, 1, 2, 3], 203)
    lease = pool.open(2)
    match = pool.match(lease, [*shared, *mine])
    assert match.num_tokens == 200
    assert pool.adopt(lease, match)
    pool.begin_step()
    pool.grow(lease, 203)
    backend.kv_copy(decoder.kv, pool.pending_copies())
    hit = decoder.logits(step([(mine, 200, lease.blocks)]))
    pool.end_step()
    cold = decoder.logits(step([([*shared, *mine], 0, [10, 11])]))
    assert np.array_equal(hit, cold)


def test_sleep_and_wake_change_nothing():
    """Weights packed again and KV imported again: no transposition is applied twice."""
    awake, woken = open_sim(), open_sim()
    first, second = Decoder(awake), Decoder(woken)
    prompt = [2, 3, 5, 7] * 40
    first.logits(step([(prompt, 0, [3, 1])]))
    woken.kv_import(second.kv, [3, 1], awake.kv_export(first.kv, [3, 1]))
    batch = step([([11], len(prompt), [3, 1])])
    assert np.array_equal(first.logits(batch), second.logits(batch))
    weight = f32(np.arange(64 * 48).reshape(64, 48) / 100)
    once, twice = (awake.pack([weight], WeightRole.LINEAR) for _ in range(2))
    assert np.array_equal(awake.unpack(once), awake.unpack(twice))


def test_int8_stays_near_the_original_layer_by_layer_and_in_all():
    made, plain = open_sim(), open_sim()
    noise = []

    def quantize(parts):
        done = [quantize_rows(f32(p), "W8A8") for p in parts]
        noise.extend(signal_to_noise(f32(p), q) for p, q in zip(parts, done, strict=True))
        return done

    small, whole = Decoder(made, quantize=quantize), Decoder(plain)
    assert min(noise) > 35, "dB of each layer"
    batch = step([([3, 1, 4, 1, 5, 9, 2, 6], 0, [0])], all_logits=True)
    a, b = (np.exp(d.logits(batch).astype(np.float64)) for d in (whole, small))
    p, q = a / a.sum(-1, keepdims=True), b / b.sum(-1, keepdims=True)
    assert (p * np.log(p / q)).sum(-1).mean() < 0.05
    assert (p.argmax(-1) == q.argmax(-1)).mean() >= 0.75


def test_no_torch_device_is_needed_or_claimed():
    """The plugin works in a process where torch knows no other device, and registers none."""
    code = (
        "import torch; from halogen_core.spi import BackendOptions;"
        "from halogen_ascend.backend import create; b = create(BackendOptions("
        "device='ascend:sim:tiny')); import numpy as np;"
        "x = b.upload(np.ones((2, 4), np.float32)); y = b.ops.add(x, x);"
        "assert b.download(y).sum() == 16; assert not isinstance(y, torch.Tensor);"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_core_and_the_simulator_name_no_device():
    import halogen_ascend.sim
    import halogen_core

    for package in (halogen_core, halogen_ascend.sim):
        for path in Path(package.__file__).parent.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    used = (node.value.id, node.attr)
                    assert used not in {("torch", "cuda"), ("torch", "npu")}, path
