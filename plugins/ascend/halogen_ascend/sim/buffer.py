"""Opaque device memory: a handle knows where its bytes are, and lets nobody on the host at them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from halogen_ascend.errors import LayoutError, PlacementError

if TYPE_CHECKING:
    from halogen_ascend.sim.device import SimDevice
    from halogen_ascend.sim.memory import Allocation

ITEMSIZE = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1, "u8": 1, "i32": 4, "u32": 4, "i64": 8}
_FORBIDDEN = [
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "matmul",
    "rmatmul",
    "neg",
    "getitem",
    "setitem",
    "len",
    "iter",
    "bool",
    "int",
    "float",
    "index",
    "lt",
    "le",
    "gt",
    "ge",
]


@attrs.define(eq=False, repr=False, slots=False)
class DeviceBuffer:
    """`shape` elements of `dtype` at an address of one simulated device.

    `layout` is `nd` (row-major) or `nz` (FRACTAL_NZ, private). torch, numpy and Python operators
    refuse it: the only crossings are the backend's upload and download.
    """

    device: SimDevice
    allocation: Allocation
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0
    layout: str = "nd"

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, rounding not included."""
        size = ITEMSIZE[self.dtype]
        for extent in self.shape:
            size *= extent
        return size

    def rows(self, start: int, stop: int) -> DeviceBuffer:
        """A view of rows start to stop; a private layout has no rows to view."""
        if self.layout != "nd":
            raise LayoutError(
                f"rows {start}:{stop} of a FRACTAL_NZ buffer of shape {list(self.shape)} are not "
                "contiguous anywhere",
                fix="slice the weight before it is packed",
            )
        if not 0 <= start <= stop <= self.shape[0]:
            raise LayoutError(f"rows {start}:{stop} are outside 0:{self.shape[0]}")
        row = self.nbytes // max(self.shape[0], 1)
        shape = (stop - start, *self.shape[1:])
        return attrs.evolve(self, shape=shape, offset=self.offset + start * row)

    def __repr__(self) -> str:
        where = f"{self.device.name}+{self.allocation.address + self.offset:#x}"
        return f"<{self.dtype} {list(self.shape)} {self.layout} at {where}>"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        _refuse(f"torch.{getattr(func, '__name__', func)}", args, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> NoReturn:
        _refuse(f"numpy.{func.__name__}", args, kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(f"numpy.{ufunc.__name__}", args, kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("numpy.asarray", (self,), None)

    def __dlpack_device__(self) -> NoReturn:
        _refuse("from_dlpack", (self,), None)

    def __dlpack__(self, **kwargs: Any) -> NoReturn:
        _refuse("from_dlpack", (self,), None)


def _refuse(op: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> NoReturn:
    named = [*((f"argument {i}", a) for i, a in enumerate(args)), *(kwargs or {}).items()]
    where = [name for name, value in named if _holds_buffer(value)] or ["an argument"]
    raise PlacementError(
        f"`{op}` got a device buffer as {', '.join(where)}; it is not addressable by the host",
        fix="call an op of the backend, or `backend.download` first",
    )


def _holds_buffer(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_buffer(v) for v in value)
    return isinstance(value, DeviceBuffer)


def _forbid(name: str) -> Any:
    def method(self: DeviceBuffer, *args: Any) -> NoReturn:
        _refuse(name, (self, *args), None)

    return method


for _name in _FORBIDDEN:
    setattr(DeviceBuffer, f"__{_name}__", _forbid(f"__{_name}__"))
