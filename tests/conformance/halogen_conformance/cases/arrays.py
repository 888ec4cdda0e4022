"""L2: arrays and weights: what goes up comes down, and what is packed can be unpacked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs
import numpy as np

from halogen_conformance.bench import Bench, refuses, same_bits
from halogen_conformance.case import Case, Failure
from halogen_conformance.oracle import formats
from halogen_conformance.oracle.numbers import EPSILON, round_to
from halogen_conformance.oracle.scaled import FLOAT8, LARGEST, SCALED
from halogen_conformance.steps import arrange, batch_of, spans
from halogen_core.spi import (
    FORMATS,
    HalogenError,
    OpSignature,
    QuantTensor,
    SupportLevel,
    WeightRole,
)


def cases() -> Iterator[Case]:
    """All of them."""
    for form in FORMATS:
        for role in ("linear", "experts", "embedding"):
            run = partial(unpack, form=form, role=WeightRole(role))
            why = "packing loses or reorders values"
            yield _case(f"weights/{form}-{role}", run, why, form)
    for form in SCALED:
        # no file has an embedding in them
        for role in ("linear", "experts"):
            run = partial(unpack, form=form, role=WeightRole(role))
            yield _case(f"weights/{form}-{role}", run, "packing loses or exchanges scales", form)
        run = partial(damaged_scales, form=form)
        why = "a scale that is missing, a code that is no number, is computed with"
        yield _case(f"weights/damaged-{form}", run, why, form)
    checks: dict[str, tuple[Any, str]] = {
        "weights/parts": (parts, "fused parts stacked in another order"),
        "weights/damaged": (damaged, "a tensor with too few bytes is read beyond its end"),
        "weights/unclaimed": (
            unclaimed,
            "bytes of a format that is not claimed are read as another",
        ),
        "arrays/round-trip": (arrays, "dtype, shape or order lost on the way to the device"),
        "arrays/copies": (array_copies, "an upload or download that shares memory with the caller"),
        "arrays/step": (step_arrays, "a step's arrays that differ from the host batch"),
        "arrays/threads": (other_thread, "a device context bound to the thread that opened it"),
    }
    for name, (run, why) in checks.items():
        yield _case(name, run, why)


def _case(name: str, run: Any, why: str, column: str = "") -> Case:
    return Case(
        id=f"L2/{name}",
        topic=name.partition("/")[0],
        why=why,
        run=run,
        column=column,
        timeout_s=120,
    )


# ---------------------------------------------------------------- weights


def unpack(bench: Bench, *, form: str, role: WeightRole) -> None:
    bench.require_format(form)
    shape = (3, 8, 256) if role is WeightRole.EXPERTS else (24, 256)
    tensor = formats.random_tensor(bench.rng, shape, form)
    packed = bench.weight(tensor, role=role)
    if tuple(packed.shape) != shape or packed.role is not role:
        raise Failure(f"packed as {packed.role}{packed.shape}, expected {role}{shape}")
    if packed.nbytes < tensor.data.nbytes // 2:
        raise Failure(f"nbytes is {packed.nbytes}, the stored tensor has {tensor.data.nbytes}")
    values = formats.values_of(tensor)
    got = bench.download(packed_values(bench, packed))
    if got.shape != shape:
        raise Failure(f"unpacked shape is {got.shape}, expected {shape}")
    error = np.abs(got - values)
    allowed = np.abs(round_to(values, bench.dtype)) * EPSILON[bench.dtype] * 2 + 1e-7
    if (error > allowed).any():
        raise Failure(f"unpacked values are off by up to {error.max():.3g}")


def packed_values(bench: Bench, packed: Any) -> Any:
    """`unpack` gives host values; keep `download`'s checks by way of a float32 array."""
    values = bench.backend.unpack(packed)
    if values.dtype != np.float32:
        raise Failure(f"unpack gave {values.dtype}, expected float32")
    return bench.backend.upload(values)


def parts(bench: Bench) -> None:
    tensors = [formats.random_tensor(bench.rng, (n, 64), "F32") for n in (48, 16, 8)]
    packed = bench.weight(*tensors)
    if tuple(packed.parts) != (48, 16, 8) or tuple(packed.shape) != (72, 64):
        raise Failure(f"parts are {packed.parts} of {packed.shape}")
    truth = np.concatenate([formats.values_of(t) for t in tensors])
    got = bench.backend.unpack(packed)
    same_bits(round_to(got, bench.dtype), round_to(truth, bench.dtype), "stacked parts")


def damaged(bench: Bench) -> None:
    whole = formats.random_tensor(bench.rng, (8, 64), "Q8_0")
    for data in (whole.data[:-1], whole.data[: len(whole.data) // 2]):
        tensor = QuantTensor(format="Q8_0", shape=(8, 64), data=data, name="damaged")
        refuses(lambda tensor=tensor: bench.weight(tensor), HalogenError)


def damaged_scales(bench: Bench, *, form: str) -> None:
    bench.require_format(form)
    whole = formats.random_tensor(bench.rng, (8, 256), form)
    for what, change in damages(whole).items():
        # `what` is told where the refusal is missing
        tensor = attrs.evolve(whole, name=what, **change)
        refuses(lambda tensor=tensor: bench.weight(tensor), HalogenError, what=what)


def damages(whole: QuantTensor) -> dict[str, dict[str, Any]]:
    """Fields of an [8, 256] tensor of `SCALED` that make it unreadable, by what is wrong."""
    found: dict[str, dict[str, Any]] = {"a byte too few": {"data": whole.data[:-1]}}
    if "scale" in whole.aux:
        found["a scale too few"] = {"aux": {**whole.aux, "scale": whole.aux["scale"][:-1]}}
        others = {key: value for key, value in whole.aux.items() if key != "scale"}
        found["no scale"] = {"aux": others}
    if whole.format in FLOAT8:
        codes = whole.data.copy()
        codes[77] = 0x80 | (LARGEST[whole.format] + 1)
        found["a code that is no number"] = {"data": codes}
    return found


def unclaimed(bench: Bench) -> None:
    claimed = bench.capabilities.weight_formats
    bench.require(bool(claimed), "weight_formats")
    for form in formats.ALL:
        if form not in claimed:
            tensor = formats.random_tensor(bench.rng, (8, 256), form)
            refuses(lambda tensor=tensor: bench.weight(tensor), HalogenError, what=form)
            signature = OpSignature(op="linear", dtype=bench.dtype, weight_format=form)
            if bench.backend.supports(signature).level is not SupportLevel.NO:
                raise Failure(f"`supports` promises {form}, which `weight_formats` does not claim")
    invented = QuantTensor(format="Q3_Z", shape=(8, 256), data=np.zeros(1024, np.uint8), name="w")
    refuses(lambda: bench.weight(invented), HalogenError, what="an invented format")


# ---------------------------------------------------------------- arrays


def arrays(bench: Bench) -> None:
    backend, rng = bench.backend, bench.rng
    for kind in (np.int32, np.int64, np.uint32, np.float32, np.uint8):
        for shape in ((0,), (1,), (7,), (3, 5), (0, 4), (2, 3, 4)):
            host = (rng.standard_normal(shape) * 100).astype(np.int32).astype(kind)
            got = backend.download(backend.upload(host))
            if got.dtype != kind:
                raise Failure(f"{np.dtype(kind)} comes back as {got.dtype}")
            same_bits(got, host, f"{np.dtype(kind)}{shape}")
    wide = rng.standard_normal((6, 8)).astype(np.float32)
    for name, view in {
        "strided": wide[::2, 1::3],
        "reversed": wide[::-1, ::-1],
        "transposed": wide.T,
        "offset": wide[1:, 3:],
    }.items():
        same_bits(backend.download(backend.upload(view)), view, f"a {name} host view")


def array_copies(bench: Bench) -> None:
    backend = bench.backend
    host = np.arange(12, dtype=np.float32)
    device = backend.upload(host)
    host[:] = -1
    backend.synchronize()
    expected = np.arange(12, dtype=np.float32)
    same_bits(backend.download(device), expected, "after the caller wrote to its array")
    backend.download(device)[:] = 7
    same_bits(backend.download(device), expected, "after the caller wrote to a download")


def step_arrays(bench: Bench) -> None:
    plan = arrange(bench.rng, spans((20, 3), (7, 7), (33, 1)), 16)
    batch = batch_of(plan, token_ids=bench.rng.integers(0, 99, 11))
    meta = bench.step(batch)
    if meta.host is not batch:
        raise Failure("the step's host batch is not the one given")
    for name in ("token_ids", "positions", "query_start_loc", "seq_lens", "logit_rows"):
        got = bench.backend.download(getattr(meta, name))
        same_bits(got.astype(np.int64), getattr(batch, name).astype(np.int64), name)


def other_thread(bench: Bench) -> None:
    x = bench.draw(3, 32)
    weight = bench.weight(bench.draw(16, 32))
    here = bench.download(bench.backend.ops.linear(bench.activation(x), weight))
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(bench.download(bench.backend.ops.linear(bench.activation(x), weight)))
        except Exception as exc:
            found.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise Failure(f"the same call in another thread raised {found[0]!r}") from found[0]
    bench.compare(found[0], here, here, what="in another thread", length=32, op="linear")
