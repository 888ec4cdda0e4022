"""Engines over tiny seeded models, in memory and as files."""

import attrs
import gguf
import numpy as np
import pytest

from halogen_core.engine.building import assemble_engine
from halogen_core.engine.options import EngineOptions
from halogen_core.engine.protocol import GenerateRequest, SamplingParams
from halogen_core.models import config_of
from halogen_core.spi import BackendOptions, Sampled
from halogen_core.spi.testing import tiny_checkpoint
from halogen_cpu_reference.backend import CpuReference, create


@pytest.fixture(scope="session")
def checkpoint():
    return tiny_checkpoint("llama-interleaved")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory, checkpoint):
    """The same model as a GGUF file without a tokenizer."""
    return write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", checkpoint)


@pytest.fixture(scope="session")
def endless_gguf(tmp_path_factory):
    """One that writes longer than any test looks away."""
    checkpoint = tiny_checkpoint("llama-interleaved", context=16384)
    return write_gguf(tmp_path_factory.mktemp("models") / "endless.gguf", checkpoint)


def write_gguf(path, checkpoint):
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


class AheadCpu(CpuReference):
    """`cpu_reference` as a backend that runs ahead: a step's tokens reach the host when the engine
    waits for them, and never before, except through the device."""

    def __init__(self, options):
        super().__init__(options, device="cpu", name="cpu_reference", description="ahead")
        self.order = []
        """`queue` and `wait`, as they come."""

    def upload_step(self, batch):
        if batch.carried is None:
            assert (batch.token_ids >= 0).all()
        return super().upload_step(batch)

    def fetch(self, sampled):
        self.order.append("queue")
        host = {
            name: None if array is None else self.download(array)
            for name in ("token_ids", "logprobs", "top_ids", "top_logprobs")
            for array in [getattr(sampled, name)]
        }

        def wait():
            self.order.append("wait")
            return Sampled(**host)

        return wait


@pytest.fixture
def make_engine(checkpoint):
    """make_engine(num_blocks=None, ahead=False, **options): an engine over the tiny model, closed
    afterwards; `ahead`: on a backend that runs ahead."""
    engines = []

    def make(num_blocks=None, ahead=False, **changes):
        options = engine_options(**changes)
        backend = (AheadCpu if ahead else create)(
            BackendOptions(threads=1, deterministic=options.deterministic)
        )
        if num_blocks is not None:
            backend = limited(backend, num_blocks)
        engines.append(assemble_engine(options, backend, checkpoint, config_of(checkpoint)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def limited(backend, num_blocks):
    """The backend as one with memory of its own, which holds exactly `num_blocks` blocks."""
    plan, able = backend.plan, attrs.evolve(backend.capabilities(), unified_memory=False)

    def small(request):
        return plan(attrs.evolve(request, min_blocks=num_blocks, max_blocks=num_blocks))

    backend.plan, backend.capabilities = small, lambda: able
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
