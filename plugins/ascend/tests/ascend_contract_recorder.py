"""Writing down what passes torch's dispatcher, and torch_npu's own signatures beside it."""

import inspect

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from halogen_ascend.npu.calls import FRACTAL_NZ


class Recorder(TorchDispatchMode):
    """Writes down every call of the vendor's operators, and of collectives."""

    def __init__(self):
        super().__init__()
        self.calls, self.schemas, self.nz, self.nz_touched = [], {}, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and any(a is w for a in args for w in self.nz):
            self.nz_touched.append(str(func))
        if func.namespace in ("npu", "atb", "c10d"):
            op = f"{func.namespace}::{func._schema.name.split('::')[1]}"
            self.calls.append(
                {
                    "op": op,
                    "overload": func._overloadname,
                    "tensors": _tensors([*args, *(kwargs or {}).items()]),
                    "named": {k: v for k, v in (kwargs or {}).items() if _plain(v)},
                    "plain": [a for a in args if _plain(a)],
                    "out": _tensors(out if isinstance(out, (tuple, list)) else [out]),
                }
            )
            self.schemas[f"{op}.{func._overloadname}"] = str(func._schema)
        if "npu_format_cast" in str(func) and args[1] == FRACTAL_NZ:
            self.nz.append(out)
        return out


def _plain(value):
    if isinstance(value, list):
        return bool(value) and all(isinstance(v, int) for v in value)
    return isinstance(value, (int, float, str, bool))


def _tensors(values):
    found = []
    for given in values:
        name, value = given if isinstance(given, tuple) and len(given) == 2 else ("", given)
        for item in _flat(value):
            assert isinstance(item, FakeTensor), f"{name} is a real tensor"
            dtype = str(item.dtype).removeprefix("torch.")
            found.append([name, item.device.type, dtype, list(item.shape)])
    return found


def _flat(value):
    if isinstance(value, (list, tuple)):
        return [item for part in value for item in _flat(part)]
    return [value] if isinstance(value, torch.Tensor) else []


class Runtime:
    """Stands for `torch.npu`, whose graphs need a device: each call must fit the real signature."""

    def __init__(self, real, path="npu", log=None):
        self._real, self._path, self.log = real, path, [] if log is None else log

    def __getattr__(self, name):
        return Runtime(getattr(self._real, name), f"{self._path}.{name}", self.log)

    def __call__(self, *args, **named):
        # an unbound method of the class wants its object first
        method = inspect.isfunction(self._real) and "." in self._real.__qualname__
        inspect.signature(self._real).bind(*([self] if method else []), *args, **named)
        self.log.append(self._path.removeprefix("npu."))
        return self

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None


class Counted:
    """The public functions of a module, counted as they are called."""

    def __init__(self, module):
        self.counts = {}
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if not name.startswith("_") and function.__module__ == module.__name__:
                self.counts[name] = 0
                setattr(module, name, self._counting(name, function))

    def _counting(self, name, function):
        def call(*args, **named):
            self.counts[name] += 1
            return function(*args, **named)

        return call
