"""Making mutants that read stored weights in a wrong way, or what is multiplied with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from halogen_conformance.oracle.formats import stored
from halogen_core.spi import QuantTensor

Change = Callable[[QuantTensor], QuantTensor]


def with_tensors(backend: Any, forms: Sequence[str], change: Change) -> None:
    """Every tensor of these formats is changed before it is packed."""
    right = backend.pack

    def pack(parts, role):
        return right([change(p) if p.format in forms else p for p in parts], role)

    backend.pack = pack


def with_aux(backend: Any, forms: Sequence[str], **changes: Callable[[Any], Any]) -> None:
    """Entries of `aux` are changed where a tensor has them."""

    def change(tensor):
        aux = {k: changes[k](v) if k in changes else v for k, v in tensor.aux.items()}
        return attrs.evolve(tensor, aux=aux)

    with_tensors(backend, forms, change)


def with_values(backend: Any, forms: Sequence[str], values: Callable[[QuantTensor], Any]) -> None:
    """Tensors are read by `values` instead, [*shape]."""
    with_tensors(backend, forms, lambda tensor: stored(values(tensor), "F32", tensor.name))


def with_activations(backend: Any, form: str, change: Callable[[Any], Any]) -> None:
    """Products with weights of a format are over changed activations."""
    pack, linear, met = backend.pack, backend.ops.linear, set()

    def packed(parts, role):
        weight = pack(parts, role)
        if any(part.format == form for part in parts):
            met.add(id(weight.payload))
        return weight

    def product(x, weight, *, bias=None):
        given = change(x) if id(weight.payload) in met else x
        return linear(given, weight, bias=bias)

    backend.pack, backend.ops.linear = packed, product
