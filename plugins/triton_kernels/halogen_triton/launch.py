"""Launch shapes as data: tiles and compiler options per kernel, arch and class of shape.

Tables are JSON files in `tables/`, one per arch: kernel -> list of rules, first match wins. A rule
has bounds (`n`, `k`, `m`, `d`) and a launch. `source` says where the numbers come from. Rules that
were measured on this machine (`halogen_triton.tuned`) come before the shipped ones.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import attrs

from halogen_triton import tuned

log = logging.getLogger(__name__)

# measured on an H200: prefill and GEMM, whose programs fill the device, are slower with it
_PDL_KERNELS = frozenset({"decode", "dense_gemv", "dense_ring", "plane_gemv", "tile_gemv"})


@attrs.frozen(kw_only=True)
class Launch:
    """Tile sizes (0: not used) and compiler options."""

    block_m: int = 0
    block_n: int = 0
    block_k: int = 0
    warps: int = 4
    stages: int = 1
    waves_per_eu: int = 0
    """AMD only: registers are limited so that so many waves fit a SIMD; 0: no limit."""
    pdl: bool = False
    """NVIDIA only: programmatic dependent launch."""
    unmasked: bool = True
    """Attention: a loop of its own for tiles that need no mask (more code, more registers)."""
    lazy: bool = False
    """Decode attention: weights are summed at the end (fewer barriers, more registers)."""
    in_turn: bool = False
    """Split decode: parts are joined one after another (fewer registers, more waiting)."""
    grouped: bool = False
    """Attention over q8_0: products by groups of 32 elements (fewer registers where there are as
    many warps as groups)."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Compiler options of a Triton launch."""
        options: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages}
        if self.waves_per_eu:
            options["waves_per_eu"] = self.waves_per_eu
        if self.pdl:
            options["launch_pdl"] = True
        return options


@attrs.frozen(kw_only=True)
class Rule:
    """A launch and the largest shape it is for."""

    launch: Launch
    bounds: Mapping[str, int] = attrs.field(factory=dict)
    least: Mapping[str, int] = attrs.field(factory=dict)
    """The smallest shape it is for."""
    programs: int = 0
    """Of a split decode: a fixed grid, a small multiple of the device's cores; 0: the prefill
    kernel serves decoding sequences too (the decode kernel would spill). Of a ring: how many the
    device holds at once."""
    direct: bool = True
    """Short contexts of a split decode take a program per (sequence, head); else they are split too
    (that kernel would spill)."""
    ring: bool = False
    """Of a dense layer: weights stream through a ring of `stages` (`dense_hopper`), and what
    surrounds it has kernels of its own; else these share the product's."""
    library: bool = False
    """The vendor's library does better (for planes: even after dequantising them)."""

    def fits(self, shape: Mapping[str, int]) -> bool:
        small = all(shape.get(key, 0) <= most for key, most in self.bounds.items())
        return small and all(shape.get(key, 0) >= low for key, low in self.least.items())


@attrs.frozen(kw_only=True)
class Tuning:
    """All rules of one arch."""

    arch: str
    source: str
    rules: Mapping[str, tuple[Rule, ...]]
    pdl: bool = False

    def rule(self, kernel: str, **shape: int) -> Rule:
        """The first rule of `kernel` that fits; the last one is for everything else."""
        rules = self.rules[kernel]
        found = next((rule for rule in rules if rule.fits(shape)), rules[-1])
        # a GEMM's programs fill the device; those of the next one would only stand in their way
        pdl = self.pdl and kernel in _PDL_KERNELS
        if pdl == found.launch.pdl:
            return found
        return attrs.evolve(found, launch=attrs.evolve(found.launch, pdl=pdl))

    def launch(self, kernel: str, **shape: int) -> Launch:
        return self.rule(kernel, **shape).launch


def parse(data: Mapping[str, Any]) -> Tuning:
    """A table as stored."""
    return Tuning(
        arch=data["arch"],
        source=data["source"],
        rules=_rules(data["kernels"]),
        pdl=data.get("pdl", False),
    )


def _rules(kernels: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, tuple[Rule, ...]]:
    return {
        kernel: tuple(Rule(**{**rule, "launch": Launch(**rule["launch"])}) for rule in entries)
        for kernel, entries in kernels.items()
    }


def available() -> list[str]:
    """Archs with a table of their own."""
    return sorted(f.name[:-5] for f in files("halogen_triton").joinpath("tables").iterdir())


def tuning(arch: str, cache_dir: str | None = None) -> Tuning:
    """The table of `arch` (or `generic`), with what was measured on this machine before it."""
    return with_measured(attrs.evolve(_shipped(arch), arch=arch), tuned.read(cache_dir, arch))


def with_measured(table: Tuning, own: tuned.Tuned) -> Tuning:
    """`table` with measured rules before its own; rules of another halogen are ignored."""
    try:
        rules = _rules(own.kernels)
    except (TypeError, KeyError) as exc:
        log.warning("measured launches of another halogen are ignored: %s", exc)
        return table
    if not rules:
        return table
    merged = {name: rules.get(name, ()) + found for name, found in table.rules.items()}
    source = f"{table.source}; {', '.join(sorted(rules))} measured on this machine"
    return attrs.evolve(table, rules=merged, source=source)


@cache
def _shipped(arch: str) -> Tuning:
    folder = files("halogen_triton").joinpath("tables")
    name = arch if arch in available() else "generic"
    return parse(json.loads(folder.joinpath(f"{name}.json").read_text(encoding="utf-8")))
