"""Mutants that cheat in benchmarks."""

from __future__ import annotations

from halogen_conformance.mutants.registry import mutant


@mutant("L5/honesty/fresh-equals-repeated")
def outputs_cached(backend):
    """A product of the same arrays is answered from a cache"""
    right, seen = backend.ops.linear, {}

    def linear(x, weight, *, bias=None):
        key = (id(x), id(weight))
        if key not in seen:
            seen[key] = x, weight, right(x, weight, bias=bias)
        return seen[key][2]

    backend.ops.linear = linear


@mutant("L5/honesty/synchronize-waits")
def synchronize_lies(backend):
    """Products are computed when somebody looks at them, after `synchronize` has returned"""
    right, download = backend.ops.linear, backend.download
    pending = {}

    def linear(x, weight, *, bias=None):
        token = x.new_empty(0)
        pending[id(token)] = token, lambda: right(x, weight, bias=bias)
        return token

    def look(array):
        if id(array) in pending and callable(pending[id(array)][1]):
            pending[id(array)] = array, pending[id(array)][1]()
        return download(pending[id(array)][1] if id(array) in pending else array)

    backend.ops.linear, backend.download = linear, look


@mutant("L5/honesty/roofline")
def nothing_computed(backend):
    """Products of one token are not computed at all"""
    right = backend.ops.linear

    def linear(x, weight, *, bias=None):
        if len(x) > 1:
            return right(x, weight, bias=bias)
        return x.new_zeros((1, weight.shape[0]))

    backend.ops.linear = linear
