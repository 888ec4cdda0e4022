"""For tests: a backend whose arrays cannot be looked into."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from halogen_core.spi import BackendOptions, HostFallbackBackend


class Handle:
    """A device array that nobody but its backend can look into.

    Every attempt to compute on it, convert it or look inside raises, naming what was tried.
    """

    __slots__ = ("__weakref__", "_secret")
    __array_ufunc__ = None

    def __init__(self, secret: NDArray[Any]) -> None:
        self._secret = secret

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise TypeError(f"torch function `{function.__name__}` was called on an opaque array")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("an opaque array was turned into a numpy array")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"`{name}` was asked of an opaque array")


def _refuse(name: str) -> Any:
    def refuse(self: Handle, *args: Any) -> NoReturn:
        raise TypeError(f"`{name}` was called on an opaque array")

    return refuse


for _name in (
    *("add", "radd", "iadd", "sub", "rsub", "mul", "rmul", "matmul", "truediv", "neg", "pow"),
    *("lt", "le", "gt", "ge", "eq", "ne", "bool", "len", "iter", "getitem", "setitem"),
    *("float", "int", "index", "contains"),
):
    setattr(Handle, f"__{_name}__", _refuse(f"__{_name}__"))
setattr(Handle, "__hash__", object.__hash__)  # noqa: B010


class OpaqueBackend(HostFallbackBackend[Handle]):
    """A backend whose arrays are `Handle`s: proof that the core only passes arrays between ops."""

    def __init__(self, options: BackendOptions | None = None, *, name: str = "opaque") -> None:
        super().__init__(options, name=name)

    def upload(self, host: NDArray[Any]) -> Handle:
        return Handle(np.array(host))

    def download(self, array: Handle) -> NDArray[Any]:
        return array._secret.copy()
