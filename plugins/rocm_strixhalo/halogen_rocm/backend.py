"""`RocmBackend`: the Triton backend on a Strix Halo, with the host's memory as its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, cast

import attrs
import torch
from numpy.typing import NDArray
from torch import Tensor

from halogen_core.spi import (
    BackendOptions,
    BackendUnavailable,
    Capabilities,
    ConfigError,
    KVCache,
    KVLayout,
    MemoryTier,
    Ops,
    OutOfDeviceMemory,
    PackedWeight,
    QuantTensor,
    Replay,
    Sampled,
    StepBatch,
    StepMeta,
    Telemetry,
    WeightRole,
)
from halogen_rocm.direct_read import file_span, read_span
from halogen_rocm.explaining import ExplainedOps, asked_bytes, explained, explaining
from halogen_rocm.locking import WorkingSet, locked_bytes, policy
from halogen_rocm.memory import RESERVE, Ledger, device_tier, hip_shortfall, host_tier
from halogen_rocm.platform import Gpu, Platform, compaction_stalls, read_platform
from halogen_rocm.probe import hip_names, hip_reason, torch_reason
from halogen_rocm.sensors import BUSY, Sensors, read_sensors, throttle_suspected
from halogen_triton import options as chosen
from halogen_triton.ahead import AheadBackend
from halogen_triton.backend import TritonBackend
from halogen_triton.launch import tuning
from halogen_triton.linear import Stacked
from halogen_triton.packing import Part

log = logging.getLogger(__name__)

MEMORY_KEYS = ("reserve_gib", "mlock")
"""Options beside those of every Triton backend."""


def create(options: BackendOptions) -> RocmBackend:
    """The factory named in the backend's spec."""
    _check_device(options.device)
    with explained():
        return RocmBackend(options, device=_hip_device())


def _hip_device() -> str:
    """Make the Strix Halo the current device, where launches go; torch's name of it.

    A probe's answer is kept for a day, so torch or its GPUs may be others by now. Raises
    `BackendUnavailable`, or torch's own error where it sees no GPU at all.
    """
    reason = torch_reason((torch.version.hip, torch.version.cuda), [], available=True)
    if reason is None:
        torch.cuda.init()
        names = hip_names(torch)
        reason = hip_reason(names)
    if reason is not None:
        raise BackendUnavailable(
            "the Strix Halo cannot be used", reasons=[reason.text], fix=reason.hint
        )
    index = names.index("gfx1151")
    torch.cuda.set_device(index)
    # torch calls HIP devices `cuda`
    return f"cuda:{index}"


def create_ahead(options: BackendOptions) -> AheadBackend:
    """A backend that compiles for gfx1151 where there is none."""
    _check_device(options.device)
    # what says nothing of kernels; typing errors are refused as they are on the device
    known = {k: v for k, v in options.extra.items() if k not in MEMORY_KEYS}
    return AheadBackend(attrs.evolve(options, extra=known), arch="gfx1151", name="rocm_strixhalo")


def _check_device(device: str | None) -> None:
    _, _, number = (device or "").partition(":")
    if number not in ("", "0"):
        raise ConfigError(
            f"device is `{device}`; a Strix Halo has one GPU, allowed is `rocm:0`",
            code="HRT-3411",
            fix="check --device",
        )


class RocmBackend(TritonBackend):
    """One Strix Halo. `root` is where /proc and /sys are read, for tests."""

    option_keys: ClassVar[tuple[str, ...]] = (*(*TritonBackend.option_keys, *MEMORY_KEYS),)

    def __init__(self, options: BackendOptions, *, root: str = "/", device: str = "cuda:0") -> None:
        self.root = root
        gpu = read_platform(root).strix_halo
        if gpu is None:
            raise BackendUnavailable(
                "this machine has no Strix Halo (gfx1151)",
                reasons=["no GPU with PCI id 1002:1586 or KFD target gfx1151"],
                fix="choose another backend; `halogen plan` needs no hardware",
            )
        super().__init__(
            options,
            tuning=tuning("gfx1151", options.cache_dir),
            device=device,
            name="rocm_strixhalo",
            description=f"rocm:0 (gfx1151, {gpu.card})",
        )
        self.working_set = WorkingSet(policy(self.options.extra.get("mlock", "auto")))
        reserve = self.options.extra.get("reserve_gib", RESERVE >> 30)
        self.reserve = chosen.whole("reserve_gib", reserve) << 30
        self._held_kv = 0
        self._best = Sensors()
        log.info("Using device: %s", self.description)
        hip_total = self._hip_memory()[1]
        if hip_total is not None and (short := hip_shortfall(gpu, hip_total)):
            log.warning(short)

    def capabilities(self) -> Capabilities:
        own = super().capabilities()
        return attrs.evolve(own, unified_memory=self._device_tier().shared_with_host)

    def memory(self) -> tuple[MemoryTier, ...]:
        platform, gpu = self._seen()
        host = host_tier(platform, gpu, ledger=self._ledger(), reserve=self.reserve)
        return (self._device_tier(), host)

    def pack(self, parts: Sequence[QuantTensor], role: WeightRole) -> PackedWeight[Tensor]:
        held = self._held_static
        asked = sum(part.data.nbytes for part in parts)
        with explained(lambda exc: self._out_of_memory("static", asked)):
            weight = super().pack(parts, role)
        if self._held_static > held:  # else it shares what is locked already
            self.working_set.add(_tensors(weight.payload))
        return weight

    # read here and not before: by its place in the file the backend knows a table again

    def _pack_part(self, part: QuantTensor, role: WeightRole) -> Part:
        return super()._pack_part(_read(part), role)

    def _dense(self, parts: Sequence[QuantTensor], role: WeightRole, dtype: torch.dtype) -> Tensor:
        return super()._dense([_read(part) for part in parts], role, dtype)

    def kv_alloc(self, layout: KVLayout, num_blocks: int) -> KVCache:
        size = layout.bytes_per_block * (num_blocks + 1)
        with explained(lambda exc: self._out_of_memory("dynamic", size)):
            cache = super().kv_alloc(layout, num_blocks)
        self._held_kv += size
        self.working_set.add(cache.payload.tensors)
        return cache

    # a kernel's fault is told where it is launched, or where the host next waits for the device

    @property
    def ops(self) -> Ops[Tensor]:
        return cast("Ops[Tensor]", ExplainedOps(self._ops, self._step_full))

    def capture(
        self, step: Callable[[StepMeta[Tensor]], Sampled[Tensor]], batch: StepBatch
    ) -> Replay[Tensor] | None:
        with explained(self._step_full):
            replay = super().capture(step, batch)
        return None if replay is None else explaining(replay, self._step_full)

    def upload_step(self, batch: StepBatch) -> StepMeta[Tensor]:
        with explained(self._step_full):
            return super().upload_step(batch)

    def fetch(self, sampled: Sampled[Tensor]) -> Callable[[], Sampled[NDArray[Any]]]:
        with explained(self._step_full):
            return explaining(super().fetch(sampled), self._step_full)

    def download(self, array: Tensor) -> NDArray[Any]:
        with explained(self._step_full):
            return super().download(array)

    def synchronize(self) -> None:
        with explained(self._step_full):
            super().synchronize()

    def counters(self) -> Telemetry:
        own = super().counters()
        gauges = {
            "device_ledger_bytes": float(self._held_static + self._held_kv),
            "locked_bytes": float(locked_bytes(self.root)),
            "working_set_bytes": float(self.working_set.asked),
        }
        return Telemetry(
            counters={
                **own.counters,
                "host_compaction_stalls": float(compaction_stalls(self.root)),
            },
            gauges={**own.gauges, **gauges, **self._sensors()},
        )

    def _sensors(self) -> dict[str, float]:
        """The GPU's sensors, and whether it seems to throttle against its best reading so far."""
        gpu = read_platform(self.root).strix_halo
        if gpu is None:
            return {}
        now = read_sensors(gpu)
        throttles = throttle_suspected(self._best, now)
        if (now.busy or 0) >= BUSY and (now.megahertz or 0) > (self._best.megahertz or 0):
            self._best = now
        return {**now.gauges(), "throttle_suspected": float(throttles)}

    def close(self) -> None:
        super().close()
        self._held_kv = 0

    def _device_tier(self) -> MemoryTier:
        platform, gpu = self._seen()
        return device_tier(
            platform,
            gpu,
            ledger=self._ledger(),
            hip_free=self._hip_memory()[0],
            reserve=self.reserve,
        )

    def _seen(self) -> tuple[Platform, Gpu]:
        platform = read_platform(self.root)
        gpu = platform.strix_halo
        assert gpu is not None, "the GPU was there when the backend was opened"
        return platform, gpu

    def _ledger(self) -> Ledger:
        return Ledger(device_bytes=self._held_static + self._held_kv)

    def _hip_memory(self) -> tuple[int, int] | tuple[None, None]:
        """Free and total bytes as HIP tells them; None off the device."""
        if self.device.type != "cuda" or not torch.cuda.is_available():
            return None, None
        free, total = torch.cuda.mem_get_info(self.device)
        return int(free), int(total)

    def _step_full(self, exc: torch.OutOfMemoryError) -> OutOfDeviceMemory:
        return self._out_of_memory("temp", asked_bytes(str(exc)))

    def _out_of_memory(self, pool: str, asked: int) -> OutOfDeviceMemory:
        tier = self._device_tier()
        lower = "--max-batch-tokens or --pool-size" if pool == "temp" else "--pool-size"
        return OutOfDeviceMemory(
            pool,
            asked=asked,
            free=tier.free,
            fix=f"{tier.source}; lower {lower} or --max-context, or raise the limit that binds",
        )


def _read(part: QuantTensor) -> QuantTensor:
    """The tensor's bytes read past the page cache where they are a map of a file."""
    span = file_span(part.data)
    if span is None or part.data.nbytes < 1 << 20:
        return part
    return attrs.evolve(part, data=read_span(*span, part.data.nbytes))


def _tensors(payload: Any) -> Iterator[Tensor]:
    """Every tensor of a packed weight."""
    if isinstance(payload, Tensor):
        yield payload
    elif isinstance(payload, Stacked):
        for part in payload.parts:
            yield from _tensors(part)
    else:
        yield from {id(t): t for t in vars_of(payload) if isinstance(t, Tensor)}.values()


def vars_of(payload: Any) -> tuple[Any, ...]:
    """The field values of an attrs record."""
    return tuple(getattr(payload, field.name) for field in attrs.fields(type(payload)))
