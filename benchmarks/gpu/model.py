"""End to end: the Qwen2.5-7B shape with seeded weights through our own decoder, runner and backend.

    python benchmarks/gpu/model.py OUT.json [--format BF16|Q4_K] [--batches 1,8,32] [--serve 64,256]

Decode rate = (batch x 256 tokens) / (median time of 264 - median time of 8 tokens), each batch size
warmed first. `--serve` gives so many requests of 512 tokens in and 128 out to the engine at once.
Both go through the engine: scheduler, block tables, outputs and all. Weights are random (made on
the device); nothing else differs from serving.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from timing import median, save

from halogen_core.engine.building import assemble_engine
from halogen_core.engine.options import EngineOptions
from halogen_core.engine.protocol import GenerateRequest
from halogen_core.spi import (
    FORMATS,
    AttentionSpec,
    BackendOptions,
    DecoderConfig,
    LayerConfig,
    PackedWeight,
    QuantTensor,
    RopeSpec,
    WeightRole,
)
from halogen_cuda.backend import CudaBackend
from halogen_triton.packing import arranged, join
from halogen_triton.planes import repack

HIDDEN, INNER, LAYERS, HQ, HKV, D, VOCAB = 3584, 18944, 28, 28, 4, 128, 152064
BLOCK = 64


def config() -> DecoderConfig:
    rope = RopeSpec(dim=D, inv_freq=tuple(1e6 ** (-2 * i / D) for i in range(D // 2)))
    attention = AttentionSpec(num_heads=HQ, num_kv_heads=HKV, head_dim=D, scale=D**-0.5, rope=rope)
    return DecoderConfig(
        architecture="qwen2",
        layers=(LayerConfig(attention=attention),) * LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        vocab_size=VOCAB,
        context_length=32768,
        norm_eps=1e-6,
        qkv_bias=True,
    )


class Shapes:
    """A checkpoint of shapes; the backend below makes the values."""

    path, architecture, content_id = "seeded", "qwen2", "seeded"

    def __init__(self, form: str) -> None:
        self.form = form

    def names(self) -> Shapes:
        return self

    def __contains__(self, name: str) -> bool:
        return True

    def __iter__(self):
        return iter(())

    def tensor(self, name: str) -> QuantTensor:
        sizes = {
            "token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN), "output_norm": (HIDDEN,),
            "attn_q": (HQ * D, HIDDEN), "attn_k": (HKV * D, HIDDEN), "attn_v": (HKV * D, HIDDEN),
            "attn_output": (HIDDEN, HQ * D), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER), "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
        }  # fmt: skip
        *_, stem, kind = name.split(".")
        shape = sizes[stem][:1] if kind == "bias" else sizes[stem]
        form = self.form if len(shape) == 2 else "F32"
        return QuantTensor(format=form, shape=shape, data=np.zeros(0, np.uint8), name=name)


class SeededBackend(CudaBackend):
    """`CudaBackend` whose weights are random numbers made on the device."""

    def pack(self, parts, role):
        made = [self._random(part, role) for part in parts]
        if len(made) > 1 and isinstance(made[0], torch.Tensor):
            made = [torch.cat(made, 0)]
        payload = join(made)
        if role is WeightRole.LINEAR:
            payload = arranged(payload, self.tuning, self.dtype)
        return PackedWeight(
            payload=payload,
            shape=tuple(payload.shape),
            nbytes=payload.nbytes,
            format_id="seeded",
            role=role,
        )

    def _random(self, part, role):
        if role is WeightRole.NORM:
            return torch.ones(part.shape, device=self.device)
        if part.format in ("F32", "BF16"):
            return torch.randn(part.shape, device=self.device, dtype=self.dtype) * 0.02
        fmt = FORMATS[part.format]
        n, k = part.shape
        raw = torch.randint(
            0, 256, (n * k // fmt.block, fmt.bytes), device=self.device, dtype=torch.uint8
        )
        for at, value in ((0, 5e-5), (2, 3.7e-4)):
            half = torch.full((1,), value, dtype=torch.float16, device=self.device)
            raw[:, at : at + 2] = half.view(torch.uint8)
        return repack(part.format, raw, part.shape)


class Session:
    """An engine over the seeded model."""

    def __init__(self, form: str, kv_gib: int = 24, run_ahead: bool = True, **extra: str) -> None:
        self.backend = SeededBackend(BackendOptions(extra=extra))
        torch.manual_seed(0)
        options = EngineOptions(
            model_path="seeded",
            model_id="seeded",
            end_token_ids=[],
            # the pool holds eight sequences of this length, so 256 of 640 tokens
            max_context=32768,
            max_batch=256,
            max_batch_tokens=16384,
            max_queue=1024,
            block_size=BLOCK,
            kv_bytes=kv_gib << 30,
            prefix_cache=False,
            run_ahead=run_ahead,
        )
        self.engine = assemble_engine(options, self.backend, Shapes(form), config())
        self.runner = self.engine.runner

    def serve(
        self, requests: int, prompt: int = 512, new: int = 128
    ) -> tuple[float, list[list[int]], float]:
        """(seconds from the first submission to the last token, tokens, seconds to the first)."""
        rng = np.random.default_rng(2)
        prompts = rng.integers(0, VOCAB, (requests, prompt)).tolist()
        made: dict[str, list[int]] = {}
        began, first = time.perf_counter(), 0.0
        for i, tokens in enumerate(prompts):
            request = GenerateRequest(
                request_id=f"{i}", prompt_token_ids=tokens, max_tokens=new, ignore_eos=True
            )
            made[request.request_id] = []
            refused = self.engine.submit(request)
            assert not refused, refused
        while self.engine.has_work:
            for output in self.engine.step():
                assert not output.error, output.error
                made[output.request_id] += output.token_ids
            first = first or time.perf_counter() - began
        return time.perf_counter() - began, list(made.values()), first

    def replay_ms(self, repeats: int = 50) -> dict[str, float]:
        """Device time of each captured step, without the host."""
        found = {}
        for key, replay in self.runner._replays.items():
            if replay is None:
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            replay.graph.replay()
            start.record()
            for _ in range(repeats):
                replay.graph.replay()
            end.record()
            end.synchronize()
            found[f"{key.rows} rows, flash {key.flash}"] = start.elapsed_time(end) / repeats
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--format", default="BF16")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new", type=int, default=264)
    parser.add_argument("--serve", default="", help="numbers of requests, like 64,256")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--option", action="append", default=[], help="backend option key=value")
    parser.add_argument("--no-run-ahead", action="store_true", help="wait for every step")
    options = parser.parse_args()
    extra = dict(pair.split("=") for pair in options.option)
    session = Session(options.format, run_ahead=not options.no_run_ahead, **extra)
    batches = map(int, filter(None, options.batches.split(",")))
    rows = [fixed_batch(session, batch, options.new, options.repeats) for batch in batches]
    replays = session.replay_ms()
    print("replay ms", {key: round(value, 3) for key, value in replays.items()}, flush=True)
    requests = map(int, filter(None, options.serve.split(",")))
    served = [serving(session, count, options.repeats) for count in requests]
    if options.profile:
        profile(session)
    save(
        options.out,
        {
            "format": options.format,
            "options": extra,
            "run_ahead": not options.no_run_ahead,
            "rows": rows,
            "replay_ms": replays,
            "serving": served,
        },
    )


def fixed_batch(session: Session, batch: int, new: int, repeats: int) -> dict:
    """Decode and prefill of one batch size."""
    for _ in range(3):  # a prompt's step is captured when it comes for the third time
        session.serve(batch, new=8)
    long, short, firsts = [], [], []
    for _ in range(repeats):
        seconds, tokens, _ = session.serve(batch, new=new)
        long.append(seconds)
        seconds, again, first = session.serve(batch, new=8)
        short.append(seconds)
        firsts.append(first)
    rate = batch * (new - 8) / (median(long) - median(short))
    print(f"batch {batch}: {rate:.1f} tok/s, prefill {median(firsts) * 1e3:.1f} ms, "
          f"512+8 {median(short) * 1e3:.1f} ms, captured {session.runner.captured_steps}, "
          f"same {tokens[0][:8] == again[0][:8]}", flush=True)  # fmt: skip
    return {"batch": batch, "tok_s": rate, "long_s": long, "short_s": short, "prefill_s": firsts}


def serving(session: Session, requests: int, repeats: int) -> dict:
    """Requests of 512 tokens in and 128 out, all at once."""
    session.serve(requests, new=48)
    timed = [session.serve(requests) for _ in range(repeats)]
    rates = [sum(map(len, tokens)) / seconds for seconds, tokens, _ in timed]
    print(f"serving {requests} x (512, 128): {median(rates):.0f} output tok/s", flush=True)
    return {"requests": requests, "seconds": [s for s, *_ in timed], "tok_s": rates}


def profile(session: Session) -> None:
    """Where the time of decode steps goes, by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    for batch in (1, 32):
        with record(activities=[ProfilerActivity.CUDA]) as seen:
            session.serve(batch, new=10)
        print(f"batch {batch}")
        print(
            seen.key_averages().table(
                sort_by="cuda_time_total", row_limit=16, max_name_column_width=50
            )
        )


if __name__ == "__main__":
    main()
