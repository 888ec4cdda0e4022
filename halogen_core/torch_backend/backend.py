"""`TorchBackend`: a whole backend in plain torch, to be used as it is or subclassed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halogen_core.spi.abilities import KernelPack
from halogen_core.spi.backend import Capabilities, Replay
from halogen_core.spi.conversions import Conversions
from halogen_core.spi.costs import LinearCost
from halogen_core.spi.float8 import FLOAT8
from halogen_core.spi.formats import FORMATS
from halogen_core.spi.memory import (
    KV_ROW_BYTES,
    KVBlocks,
    KVCache,
    KVLayout,
    KVSpec,
    MemoryPlan,
    MemoryRequest,
    MemoryTier,
)
from halogen_core.spi.operations import (
    OpSignature,
    PackedWeight,
    Placement,
    QuantTensor,
    Support,
    SupportLevel,
    WeightRole,
)
from halogen_core.spi.ops import OPS, Ops
from halogen_core.spi.records import BackendOptions, Cost, Limits, StepShape, Telemetry
from halogen_core.spi.step import Sampled, StepBatch, StepMeta
from halogen_core.torch_backend import host_memory, kv, scaled, weights
from halogen_core.torch_backend.dequant import DENSE_DTYPES, dequantize
from halogen_core.torch_backend.invariant import InvariantTorchOps, claim_holds
from halogen_core.torch_backend.ops import TorchOps
from halogen_core.torch_backend.options import DTYPES, chosen_dtype, refuse_unknown
from halogen_core.torch_backend.packs import serve
from halogen_core.torch_backend.signatures import refusals
from halogen_core.torch_backend.step import carry, upload_step

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TorchBackend:
    """One torch device, opened. Satisfies `spi.Backend[torch.Tensor]`.

    A plugin subclasses it and overrides as little as it likes: `ops_class` (or single ops of it),
    `memory`, `pack` and `unpack`, the KV methods (together, they share a layout), `capture`.
    """

    ops_class: ClassVar[type[TorchOps]] = TorchOps
    invariant_ops_class: ClassVar[type[TorchOps] | None] = InvariantTorchOps
    """Used when the options ask for deterministic results; None: the device has none."""
    torch_is_native: ClassVar[bool] = False
    """Plain torch is what this backend means to run; otherwise such ops count as fallbacks."""
    option_keys: ClassVar[tuple[str, ...]] = ("dtype",)
    """Keys of `BackendOptions.extra` that are known here."""

    def __init__(
        self,
        options: BackendOptions | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        name: str = "torch",
        description: str = "",
    ) -> None:
        self.options = options or BackendOptions()
        self.device = torch.device(device)
        self.name = name
        self.description = description or f"{name} on {self.device}"
        refuse_unknown(self.options.extra, self.option_keys, name)
        self.dtype = chosen_dtype(self.options.extra, dtype or torch.float32)
        if self.options.threads is not None:
            torch.set_num_threads(self.options.threads)
        self._cost = LinearCost()
        self._held_static = 0
        self.conversions = Conversions()
        self._tables: WeakValueDictionary[tuple[int, int], weights.StoredRows] = (
            WeakValueDictionary()
        )
        self._ops = self._make_ops()
        self._packs: dict[str, KernelPack] = {}
        # on an accelerator (H200) one of ten tiny models differed, so the claim is the host's alone
        host = self.device.type == "cpu"
        self._claims_invariance = self.invariant and host and claim_holds(self._ops, self.device)

    # -- identity

    @property
    def ops(self) -> Ops[Tensor]:
        return self._ops

    @property
    def invariant(self) -> bool:
        """Whether it runs the batch-invariant ops."""
        return self.options.deterministic and self.invariant_ops_class is not None

    def capabilities(self) -> Capabilities:
        names = (*FORMATS, *scaled.READERS)
        kinds = {name: "native" if name in DENSE_DTYPES else "emulated" for name in names}
        own = _NAMES[self.dtype]
        return Capabilities(
            name=self.name,
            device=self.description,
            compute_dtypes=(own,),
            weight_formats=kinds,
            kv_dtypes=(own, *(kind for kind in KV_ROW_BYTES if kind != own)),
            kv_block_sizes=(16, 32, 64, 8, 128),
            deterministic=self.device.type == "cpu",
            batch_invariant=self._claims_invariance,
            unified_memory=self.device.type == "cpu",
        )

    def supports(self, signature: OpSignature) -> Support:
        reasons = refusals(signature, _NAMES[self.dtype])
        if reasons:
            return Support(level=SupportLevel.NO, reasons=reasons)
        placement = self._place(signature.op)
        return Support(level=placement.level, reasons=placement.reasons)

    def placement(self) -> tuple[Placement, ...]:
        return self.conversions.told(self._place(op) for op in OPS)

    # -- memory

    def memory(self) -> tuple[MemoryTier, ...]:
        return (host_memory.host_tier(),)

    def plan(self, request: MemoryRequest) -> MemoryPlan:
        return host_memory.divide(self.memory()[0], request, held_static=self._held_static)

    # -- arrays

    def upload(self, host: NDArray[Any]) -> Tensor:
        # a copy, so that the caller may go on writing to its array
        return torch.from_numpy(np.array(host)).to(self.device)

    def download(self, array: Tensor) -> NDArray[Any]:
        host = array.detach().to("cpu")
        values: NDArray[Any] = (host.float() if host.is_floating_point() else host).numpy()
        return values.copy() if array.device.type == "cpu" else values

    def upload_step(self, batch: StepBatch) -> StepMeta[Tensor]:
        return upload_step(batch, self.device)

    carry = staticmethod(carry)

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def close(self) -> None:
        self._held_static = 0
        self._tables.clear()

    # -- weights

    def pack(self, parts: Sequence[QuantTensor], role: WeightRole) -> PackedWeight[Tensor]:
        payload: Tensor | weights.StoredRows
        if role is WeightRole.EMBEDDING and len(parts) == 1 and parts[0].format in FORMATS:
            payload = self._table(parts[0])
        else:
            exact = role in (WeightRole.NORM, WeightRole.SINKS)
            payload = self._dense(parts, role, torch.float32 if exact else self.dtype)
        weight = weights.packed(payload, parts, role)
        self._held_static += weight.nbytes
        return weight

    def unpack(self, weight: PackedWeight[Tensor]) -> NDArray[Any]:
        payload = weight.payload
        if isinstance(payload, weights.StoredRows):
            payload = dequantize(payload.rows, payload.format)
        return self.download(payload)

    # -- KV

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        return kv.layout_of(spec)

    def kv_alloc(self, layout: KVLayout, num_blocks: int) -> KVCache:
        return kv.allocate(layout, num_blocks, self.device, free=self.memory()[0].free)

    def kv_copy(self, kv_cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        kv.copy_blocks(kv_cache, pairs)

    def kv_export(self, kv_cache: KVCache, blocks: Sequence[int]) -> KVBlocks:
        return kv.export_blocks(kv_cache, blocks)

    def kv_import(self, kv_cache: KVCache, blocks: Sequence[int], data: KVBlocks) -> None:
        kv.import_blocks(kv_cache, blocks, data)

    # -- step capture

    def capture_key(self, batch: StepBatch) -> Hashable | None:
        return None

    def capture(
        self, step: Callable[[StepMeta[Tensor]], Sampled[Tensor]], batch: StepBatch
    ) -> Replay[Tensor] | None:
        return None

    # -- advice and telemetry

    def limits(self) -> Limits:
        return Limits()

    def cost(self, shape: StepShape) -> Cost | None:
        return self._cost.predict(shape)

    def observe(self, shape: StepShape, seconds: float) -> None:
        self._cost.observe(shape, seconds)

    def counters(self) -> Telemetry:
        return Telemetry(gauges={"static_bytes": float(self._held_static)})

    # -- kernel packs

    def install(self, pack: KernelPack) -> None:
        """Let `pack` serve its op where it can."""
        own = getattr(self._ops, pack.op)
        setattr(self._ops, pack.op, serve(pack, own, _NAMES[self.dtype]))
        self._packs[pack.op] = pack

    # -- own

    def _make_ops(self) -> TorchOps:
        kind = self.invariant_ops_class if self.invariant else self.ops_class
        assert kind is not None
        return kind(self.dtype)

    def _place(self, op: str) -> Placement:
        own = self._own_place(op)
        pack = self._packs.get(op)
        if pack is None:
            return own
        reason = f"`{pack.name}` within its conditions, else {own.implementation}"
        return attrs.evolve(own, implementation=pack.name, reasons=(reason, *own.reasons))

    def _own_place(self, op: str) -> Placement:
        kind = type(self._ops)
        owner = next(cls for cls in kind.__mro__ if op in vars(cls))
        plain = owner.__module__.startswith(__package__)
        if plain and not self.torch_is_native:
            reason = f"`{self.name}` does not accelerate it; plain torch on {self.device}"
            return Placement(
                op=op, level=SupportLevel.FALLBACK, implementation="torch", reasons=(reason,)
            )
        implementation = "torch" if plain else f"{owner.__module__}.{owner.__qualname__}"
        return Placement(op=op, level=SupportLevel.NATIVE, implementation=implementation)

    def _dense(self, parts: Sequence[QuantTensor], role: WeightRole, dtype: torch.dtype) -> Tensor:
        if len(parts) == 1 and DENSE_DTYPES.get(parts[0].format) is dtype:
            # a tied table is packed for two roles and held once
            table = self._tables.get(_address(parts[0]))
            if table is not None:
                return table.rows.view(dtype).view(parts[0].shape)
        stacked = weights.stack(parts, role, dtype, self.device)
        for part in parts:
            if part.format in FLOAT8:
                self.conversions.add_float8(part, _NAMES[dtype])
        return stacked

    def _table(self, part: QuantTensor) -> weights.StoredRows:
        found = self._tables.get(_address(part))
        if found is None:
            found = self._tables[_address(part)] = weights.stored_rows(part, self.device)
        return found


def _address(part: QuantTensor) -> tuple[int, int]:
    return part.data.__array_interface__["data"][0], part.data.size
