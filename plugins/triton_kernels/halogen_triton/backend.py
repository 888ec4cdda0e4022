"""`TritonBackend`: everything that CUDA and ROCm devices share; plugins add their platform."""

from __future__ import annotations

import timeit
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import attrs
import torch
from numpy.typing import NDArray
from torch import Tensor

from halogen_core.spi import (
    FLOAT8,
    FORMATS,
    BackendOptions,
    Capabilities,
    ConfigError,
    KernelCounts,
    KernelPack,
    KVBlocks,
    KVCache,
    KVLayout,
    KVSpec,
    Limits,
    MemoryPlan,
    MemoryRequest,
    OpSignature,
    OutOfDeviceMemory,
    PackedWeight,
    QuantTensor,
    Replay,
    Sampled,
    StepBatch,
    StepMeta,
    Support,
    SupportLevel,
    Telemetry,
    TorchBackend,
    WeightRole,
)
from halogen_triton import (
    autotune,
    capture,
    flash_attn_pack,
    interpreter,
    kernel_cache,
    kv,
    launch,
    packing,
    tuned,
)
from halogen_triton import options as chosen
from halogen_triton.int8 import Int8
from halogen_triton.launch import Tuning
from halogen_triton.ops import TritonOps

GRAPH_BYTES = 512 << 20
"""Set aside for captured steps: their shared pool holds one step of the largest bucket."""
FLASH_THRESHOLD = 256
"""Tokens; `halogen bench --fit-flash-threshold` measures a better one for a machine. On an H200 a
step of the 7B shape with contexts of 512 takes 1.3 % less split than not at 1 row, as much at 8,
0.5 % more at 32 (4 KV heads)."""


class TritonBackend(TorchBackend):
    """A torch device that runs Triton kernels. Subclasses give the device and its memory."""

    option_keys: ClassVar[tuple[str, ...]] = (
        *("dtype", "flash_threshold", "graphs", "pdl", "buckets", "graph_mib", "attention"),
    )
    invariant_ops_class = None

    def __init__(
        self,
        options: BackendOptions | None = None,
        *,
        tuning: Tuning,
        device: str | torch.device,
        dtype: torch.dtype = torch.bfloat16,
        name: str = "triton",
        description: str = "",
    ) -> None:
        options = options or BackendOptions()
        extra = options.extra
        pdl = chosen.switch("pdl", extra.get("pdl", "on"))
        self.tuning = attrs.evolve(tuning, pdl=tuning.pdl and pdl)
        super().__init__(options, device=device, dtype=dtype, name=name, description=description)
        self._payloads: WeakValueDictionary[tuple[str, int, int], Any] = WeakValueDictionary()
        self._trash: tuple[int, int] | None = None
        self._graph_pool: Any = None
        self._captured = 0
        self._prompts: Counter[capture.CaptureKey] = Counter()
        graphs = chosen.switch("graphs", extra.get("graphs", "on"))
        self._graphs = graphs and self.device.type != "cpu"
        self._attention = chosen.attention(extra.get("attention", "auto"))
        self._buckets = chosen.buckets(extra.get("buckets"))
        self._graph_bytes = (
            chosen.whole("graph_mib", extra.get("graph_mib", GRAPH_BYTES >> 20)) << 20
        )
        # the interpreter compiles nothing
        compiles = not interpreter.active()
        self._watch = kernel_cache.keep(options.cache_dir, tuning.arch) if compiles else None
        measured = tuned.read(options.cache_dir, tuning.arch).flash_threshold
        default = FLASH_THRESHOLD if measured is None else measured
        self.adjust("flash_threshold", extra.get("flash_threshold", str(default)))

    @property
    def triton_ops(self) -> TritonOps:
        """The ops, typed."""
        ops = self._ops
        assert isinstance(ops, TritonOps)
        return ops

    def capabilities(self) -> Capabilities:
        formats = dict.fromkeys(("F32", "F16", "BF16", *packing.PACKED_FORMATS), "native")
        return attrs.evolve(
            super().capabilities(),
            weight_formats=formats | dict.fromkeys(FLOAT8, "emulated"),
            kv_block_sizes=tuple(sorted(kv.BLOCK_SIZES, key=self._awkward)),
            graph_capture=self._graphs,
            # whoever arrives last adds parts in their order: the same step gives the same bits
            deterministic=True,
            batch_invariant=False,
            unified_memory=False,
            extra={"tuning": f"{self.tuning.arch}: {self.tuning.source}"},
        )

    def _awkward(self, block_size: int) -> bool:
        """Whether the attention asked for cannot use such blocks."""
        return self._attention == "flash-attn" and bool(block_size % flash_attn_pack.PAGE)

    def install(self, pack: KernelPack) -> None:
        if self._attention != "triton" or pack.op != "attention":
            super().install(pack)

    def supports(self, signature: OpSignature) -> Support:
        reasons = []
        if signature.block_size is not None and signature.block_size not in kv.BLOCK_SIZES:
            reasons.append(f"block size {signature.block_size} is not in {kv.BLOCK_SIZES}")
        if signature.attention is not None and signature.attention.head_dim > 256:
            reasons.append(f"head dim {signature.attention.head_dim} is over 256")
        if reasons:
            return Support(level=SupportLevel.NO, reasons=tuple(reasons))
        return super().supports(signature)

    def plan(self, request: MemoryRequest) -> MemoryPlan:
        if self._graphs:
            request = attrs.evolve(request, graph_bytes=max(request.graph_bytes, self._graph_bytes))
        return super().plan(request)

    # -- weights

    def pack(self, parts: Sequence[QuantTensor], role: WeightRole) -> PackedWeight[Tensor]:
        for part in parts:
            packing.check(part)
        quantised = [part.format in packing.PACKED_FORMATS for part in parts]
        if not any(quantised) or role not in (
            WeightRole.LINEAR, WeightRole.EMBEDDING, WeightRole.EXPERTS,
        ):  # fmt: skip
            return self._pack_dense(parts, role)
        payload = self._once(parts, role, self._joined)
        self.triton_ops.rounds |= isinstance(payload, Int8)
        axis = 1 if role is WeightRole.EXPERTS else 0
        return PackedWeight[Tensor](
            payload=payload,
            shape=tuple(payload.shape),
            nbytes=payload.nbytes,
            format_id="triton/" + "+".join(dict.fromkeys(part.format for part in parts)),
            role=role,
            parts=tuple(part.shape[axis] for part in parts),
        )

    def unpack(self, weight: PackedWeight[Tensor]) -> NDArray[Any]:
        payload = weight.payload
        if not isinstance(payload, Tensor):
            return self.download(packing.values(payload))
        return super().unpack(weight)

    def _once(
        self,
        parts: Sequence[QuantTensor],
        role: WeightRole,
        make: Callable[[Sequence[QuantTensor], WeightRole], Any],
    ) -> Any:
        """What `make` gives; a table that embeds and answers is made and counted once."""
        key, found = _table_key(parts, role), None
        if key is not None:
            found = self._payloads.get(key)
        if found is None:
            found = make(parts, role)
            self._held_static += found.nbytes
            if key is not None:
                self._payloads[key] = found
        return found

    def _joined(self, parts: Sequence[QuantTensor], role: WeightRole) -> Any:
        """Parts as one payload."""
        made = packing.join([self._pack_part(part, role) for part in parts])
        return packing.arranged(made, self.tuning, self.dtype)

    def _pack_part(self, part: QuantTensor, role: WeightRole) -> packing.Part:
        if part.format not in packing.PACKED_FORMATS:
            return self._dense([part], role, self.dtype)
        return packing.packed_part(part, self.device, role)

    def _pack_dense(self, parts: Sequence[QuantTensor], role: WeightRole) -> PackedWeight[Tensor]:
        exact = role in (WeightRole.NORM, WeightRole.SINKS)
        dtype = torch.float32 if exact else self.dtype
        payload = self._once(parts, role, lambda parts, role: self._dense(parts, role, dtype))
        axis = 1 if role is WeightRole.EXPERTS else 0
        return PackedWeight[Tensor](
            payload=payload,
            shape=tuple(payload.shape),
            nbytes=payload.nbytes,
            format_id=f"triton/dense/{payload.dtype}".replace("torch.", ""),
            role=role,
            parts=tuple(part.shape[axis] for part in parts),
        )

    # -- KV

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        return kv.layout_of(spec)

    def kv_alloc(self, layout: KVLayout, num_blocks: int) -> KVCache:
        asked, free = layout.bytes_per_block * (num_blocks + 1), self.memory()[0].free
        if asked > free:
            raise OutOfDeviceMemory("dynamic", asked=asked, free=free, fix="lower --max-context")
        self._trash = (num_blocks * layout.spec.block_size, layout.spec.block_size)
        return kv.allocate(layout, num_blocks, self.device)

    def kv_copy(self, kv_cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        kv.copy_blocks(kv_cache, pairs)

    def kv_export(self, kv_cache: KVCache, blocks: Sequence[int]) -> KVBlocks:
        return kv.export_blocks(kv_cache, blocks)

    def kv_import(self, kv_cache: KVCache, blocks: Sequence[int], data: KVBlocks) -> None:
        kv.import_blocks(kv_cache, blocks, data)

    def download(self, array: Any) -> NDArray[Any]:
        return super().download(self.triton_ops.settled(array))

    # -- step capture

    def capture_key(self, batch: StepBatch) -> Hashable | None:
        if not self._graphs or self._trash is None:
            return None
        key = capture.capture_key(batch, self.triton_ops.flash_threshold, self._buckets)
        if key is not None and key.prompt:
            self._prompts[key] += 1
            return key if self._prompts[key] > capture.PROMPT_USES else None
        return key

    def capture(
        self, step: Callable[[StepMeta[Tensor]], Sampled[Tensor]], batch: StepBatch
    ) -> Replay[Tensor] | None:
        key = self.capture_key(batch)
        if not isinstance(key, capture.CaptureKey) or self._trash is None:
            return None
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        inputs = capture.StaticInputs(key, *self._trash, self.device)
        inputs.fill(batch)
        meta = capture.static_meta(self.upload_step, inputs)
        self._captured += 1
        calls = self.triton_ops.attention_calls
        before = Counter(calls)
        replay = capture.capture(step, meta, inputs, self._graph_pool)
        once = {path: n // capture.RUNS for path, n in (calls - before).items()}
        return attrs.evolve(replay, replayed=lambda: calls.update(once))

    def fetch(self, sampled: Sampled[Tensor]) -> Callable[[], Sampled[NDArray[Any]]]:
        return capture.fetch(sampled)

    # -- advice and telemetry

    def limits(self) -> Limits:
        buckets = self._buckets if self._graphs else ()
        return Limits(token_buckets=buckets)

    def counters(self) -> Telemetry:
        own, kernels = super().counters(), self.kernel_counts()
        counts = {
            "captured_graphs": self._captured,
            "kernels_compiled": kernels.compiled,
            "kernels_loaded": kernels.loaded,
            "kernels_rebuilt": kernels.rebuilt,
            **{f"attention_calls_{k}": n for k, n in self.triton_ops.attention_calls.items()},
        }
        return attrs.evolve(own, counters={**own.counters, **counts})

    def kernel_counts(self) -> KernelCounts:
        return KernelCounts() if self._watch is None else self._watch.counts()

    def adjustable(self) -> Mapping[str, str]:
        return {"flash_threshold": str(self.triton_ops.flash_threshold)}

    def adjust(self, key: str, value: str) -> None:
        if key != "flash_threshold":
            raise ConfigError(
                f"`{key}` cannot be changed while `{self.name}` runs; it can change"
                f" {', '.join(self.adjustable())}",
                code="HRT-3407",
                fix="set other options at the start with --backend-option",
            )
        self.triton_ops.flash_threshold = chosen.whole(key, value)

    def remember(self, key: str, value: str) -> str:
        self.adjust(key, value)
        return self._keep(flash_threshold=self.triton_ops.flash_threshold)

    def tune(self, rehearse: Callable[[], None], progress: Callable[[str], None]) -> str:
        self._cache_folder()
        with autotune.met(self.triton_ops) as calls:
            rehearse()
        kernels = autotune.measure(self.triton_ops, calls, self._seconds, progress)
        where = self._keep(kernels=kernels)
        measured = tuned.Tuned(kernels=kernels)
        self.tuning = self.triton_ops.tuning = launch.with_measured(self.tuning, measured)
        return where

    def _keep(self, **changes: Any) -> str:
        folder = self._cache_folder()
        own = attrs.evolve(tuned.read(folder, self.tuning.arch), **changes)
        return str(tuned.write(folder, self.tuning.arch, own))

    def _cache_folder(self) -> str:
        if self.options.cache_dir is None:
            raise ConfigError(
                "measurements cannot be kept: there is no cache folder",
                code="HRT-3409",
                fix="set --cache-dir",
            )
        return self.options.cache_dir

    def _seconds(self, call: Callable[[], object]) -> float:
        """Median of a call, on a GPU within a captured graph (launches would hide the kernel)."""
        if self.device.type == "cpu":
            return min(timeit.repeat(call, number=1, repeat=3))
        import triton.testing

        return float(triton.testing.do_bench_cudagraph(call, rep=20, return_mode="median")) / 1e3

    def close(self) -> None:
        super().close()
        self._payloads.clear()
        self._graph_pool = None

    def _make_ops(self) -> TritonOps:
        return TritonOps(self.dtype, self.tuning, self.device)


def _table_key(parts: Sequence[QuantTensor], role: WeightRole) -> tuple[str, int, int] | None:
    """What a token table is known by; None: packed anew each time.

    The name counts: what was read or unpacked lies in memory that the next tensor may get.
    """
    if len(parts) > 1 or role not in (WeightRole.EMBEDDING, WeightRole.LINEAR):
        return None
    part = parts[0]
    # 8-bit floats are converted, and each conversion is told
    if not part.name or part.format not in FORMATS:
        return None
    return part.name, part.data.__array_interface__["data"][0], part.data.size
