"""Steps replayed under one key are composed alike: with every row's logits, or with some rows'."""

import numpy as np
from ggml_cases import backend_for, shuffled_tables, step_batch

from halogen_core.models import Decoder, config_of, kv_spec
from halogen_core.spi.testing import tiny_checkpoint


def test_decoding_beside_a_chunk_is_not_decoding_alone():
    """The model selects no rows where all have logits; such a graph must not serve other steps."""
    rng, backend = np.random.default_rng(0), backend_for("auto", threads=1)
    checkpoint = tiny_checkpoint("llama", seed=1)
    config = config_of(checkpoint)
    decoder = Decoder.load(config, checkpoint, backend)

    def answer(batch, kv, replay=None):
        def step(meta):
            return backend.ops.sample(decoder.logits(backend.ops, meta, kv), meta)

        if replay is None:
            return step(backend.upload_step(batch)), step
        return replay(batch), step

    for mix in ([(1, 5), (1, 9), (3, 3)], [(2, 8), (1, 4), (1, 6), (1, 1)]):
        count = sum(n for n, _ in mix)
        alone = [(1, 7)] * count
        tables, blocks = shuffled_tables(rng, [*alone, *mix], 16)
        layout = backend.kv_layout(kv_spec(config, dtype="f32", block_size=16))
        kv = backend.kv_alloc(layout, blocks)
        first = step_batch(alone, tables[:count], 16, rng.integers(0, 97, count))
        then = step_batch(mix, tables[count:], 16, rng.integers(0, 97, count))
        keys = [backend.capture_key(b) for b in (first, then)]
        assert keys[0].tokens == keys[1].tokens
        want, step = answer(then, kv)
        replays = {}
        for key, batch in zip(keys, (first, then), strict=True):
            if key not in replays:
                replays[key] = backend.capture(step, batch)
        got = replays[keys[1]](then)
        np.testing.assert_array_equal(
            backend.download(got.token_ids), backend.download(want.token_ids)
        )
