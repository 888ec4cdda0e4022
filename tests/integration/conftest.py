"""Engines over tiny seeded models, in memory and as files."""

import gguf
import numpy as np
import pytest

from halogen_core.engine.building import assemble_engine
from halogen_core.engine.options import EngineOptions
from halogen_core.engine.protocol import GenerateRequest, SamplingParams
from halogen_core.models import config_of
from halogen_core.spi import BackendOptions
from halogen_core.spi.testing import tiny_checkpoint
from halogen_cpu_reference.backend import create


@pytest.fixture(scope="session")
def checkpoint():
    return tiny_checkpoint("llama-interleaved")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory, checkpoint):
    """The same model as a GGUF file without a tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in checkpoint.hparams.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"llama.{key}", value)
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name)
        writer.add_tensor(name, tensor.data.view(np.float32).reshape(tensor.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def engine_options(path="memory", **changes):
    defaults = {
        "model_path": str(path),
        "model_id": "tiny",
        "end_token_ids": [],
        "backend": "cpu_reference",
        "deterministic": True,
        "threads": 1,
        "block_size": 8,
        "max_batch": 8,
        "max_batch_tokens": 64,
    }
    return EngineOptions(**{**defaults, **changes})


@pytest.fixture
def make_engine(checkpoint):
    """make_engine(num_blocks=None, **options): an engine over the tiny model, closed afterwards."""
    engines = []

    def make(num_blocks=None, **changes):
        options = engine_options(**changes)
        backend = create(BackendOptions(threads=1, deterministic=options.deterministic))
        if num_blocks is not None:
            backend = limited(backend, num_blocks)
        engines.append(assemble_engine(options, backend, checkpoint, config_of(checkpoint)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def limited(backend, num_blocks):
    """The backend with a KV pool of exactly `num_blocks` blocks."""
    plan = backend.plan

    def small(request):
        import attrs

        return plan(attrs.evolve(request, min_blocks=num_blocks, max_blocks=num_blocks))

    backend.plan = small
    return backend


def request(name, prompt, *, max_tokens=12, **changes):
    sampling = changes.pop("sampling", SamplingParams())
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=list(prompt),
        max_tokens=max_tokens,
        sampling=sampling,
        **changes,
    )


def run(engine, *requests, submit_at=None, abort_at=None):
    """Drive the engine by hand; tokens, last outputs and the number of steps, by request id."""
    submit_at = submit_at or dict.fromkeys((r.request_id for r in requests), 0)
    abort_at = abort_at or {}
    tokens = {r.request_id: [] for r in requests}
    last, step = {}, 0
    pending = list(requests)
    while pending or engine.has_work:
        for item in [r for r in pending if submit_at[r.request_id] <= step]:
            pending.remove(item)
            for output in engine.submit(item):
                last[output.request_id] = output
        for name in [n for n, at in abort_at.items() if at == step]:
            engine.abort(name)
        if engine.has_work:
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
                if output.finish_reason:
                    last[output.request_id] = output
        stats = engine.stats()
        assert (
            stats.blocks_free + stats.blocks_active + stats.blocks_cached + stats.blocks_pinned
            == (stats.blocks_total)
        )
        step += 1
        assert step < 5000, "no progress"
    return tokens, last
