"""HBM of the simulated part: four pools over one memory, banks, high-water marks, honest refusal.

Pools: `static` weights, `dynamic` KV, `temp` activations, `graph` what captured steps hold on to.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping

import attrs
import numpy as np
import torch

from halogen_ascend.errors import UseAfterFree
from halogen_ascend.sim.profiles import Profile
from halogen_core.spi import ConfigError, OutOfDeviceMemory

POOLS = ("static", "dynamic", "temp", "graph")
BANKS_PER_GROUP = 4
"""A KV block lies in one group of banks; weights are striped over all."""
_WINDOW = 1 << 44


@attrs.define(eq=False)
class Allocation:
    """Bytes [address, address + nbytes) of one pool; `bank` None means striped over all."""

    address: int
    nbytes: int
    pool: str
    bank: int | None
    owner: Hbm | None
    written: np.ndarray | None
    """Which equal parts were written since allocation; None: all of it."""
    ticket: tuple[str, int] = ("", 0)
    """Queue and number of the last submission that writes it."""

    @property
    def live(self) -> bool:
        return self.owner is not None

    def free(self) -> None:
        """Give the bytes back; raises `UseAfterFree` the second time."""
        if self.owner is None:
            raise UseAfterFree(
                f"{self.nbytes} bytes at {self.address:#x} of pool `{self.pool}` are freed twice",
                fix="free a buffer once, by its last owner",
            )
        owner, self.owner = self.owner, None
        owner.give_back(self)

    def __del__(self) -> None:
        if self.owner is not None:
            self.free()


@attrs.define(eq=False)
class Pool:
    """One arena: lowest hole that fits, neighbours merged, the end trimmed."""

    name: str
    base: int
    budget: int
    used: int = 0
    peak: int = 0
    allocations: int = 0
    top: int = 0
    """Bytes from `base` that the arena ever touched and still holds."""
    biggest: int = 0
    """The largest request so far."""
    _holes: list[tuple[int, int]] = attrs.field(factory=list)

    def take(self, nbytes: int) -> int | None:
        """An address for `nbytes`, or None when no hole and no room at the end has it."""
        i = next((i for i, (_, size) in enumerate(self._holes) if size >= nbytes), None)
        if i is not None:
            address, size = self._holes.pop(i)
            if size > nbytes:
                self._holes.insert(i, (address + nbytes, size - nbytes))
        elif self.top + nbytes <= self.budget:
            address = self.base + self.top
            self.top += nbytes
        else:
            return None
        self.used += nbytes
        self.allocations += 1
        self.biggest = max(self.biggest, nbytes)
        self.peak = max(self.peak, self.used)
        return address

    def give(self, address: int, nbytes: int) -> None:
        """Return a range; merges with the holes beside it."""
        self.used -= nbytes
        i = bisect.bisect_left(self._holes, (address, 0))
        if i < len(self._holes) and address + nbytes == self._holes[i][0]:
            nbytes += self._holes.pop(i)[1]
        if i and sum(self._holes[i - 1]) == address:
            i -= 1
            address, before = self._holes.pop(i)
            nbytes += before
        if address + nbytes == self.base + self.top:
            self.top = address - self.base
        else:
            self._holes.insert(i, (address, nbytes))

    @property
    def free(self) -> int:
        return self.budget - self.used

    @property
    def largest(self) -> int:
        """The largest single allocation that would succeed."""
        return max([size for _, size in self._holes] + [self.budget - self.top])

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes in holes too small for the largest request made so far."""
        lost = sum(size for _, size in self._holes if size < self.biggest)
        return lost / self.free if self.free else 0.0


@attrs.define(eq=False)
class Hbm:
    """The memory of one part."""

    part: Profile
    pools: dict[str, Pool]
    bank_bytes: list[int]
    cells: dict[int, torch.Tensor] = attrs.field(factory=dict)
    """Contents by address of the allocation."""

    @classmethod
    def open(cls, part: Profile, budgets: Mapping[str, int] | None = None) -> Hbm:
        """Empty memory; `budgets` fixes pools, the others share what is left.

        Raises `ConfigError` (HRT-7104) when the budgets exceed the part.
        """
        budgets = dict(budgets or {})
        if sum(budgets.values()) > part.usable_bytes:
            sums = " + ".join(f"{name} {gib(size)}" for name, size in budgets.items())
            whole = sums if len(budgets) == 1 else f"{sums} = {gib(sum(budgets.values()))}"
            raise ConfigError(
                f"pools {whole} exceed the {gib(part.usable_bytes)} usable of `{part.name}` "
                f"({gib(part.hbm_bytes)} less {gib(part.hbm_reserved)} reserved)",
                code="HRT-7104",
                fix="make a pool smaller, or leave it unset to share what is left",
            )
        pools = {
            name: Pool(name=name, base=(i + 1) * _WINDOW, budget=budgets.get(name, _WINDOW))
            for i, name in enumerate(POOLS)
        }
        return cls(part=part, pools=pools, bank_bytes=[0] * part.banks)

    @property
    def groups(self) -> int:
        return max(self.part.banks // BANKS_PER_GROUP, 1)

    @property
    def used(self) -> int:
        return sum(pool.used for pool in self.pools.values())

    def available(self, name: str) -> int:
        """Bytes that pool `name` could still grow by."""
        fixed = sum(p.free for p in self.pools.values() if p.budget != _WINDOW and p.name != name)
        return min(self.pools[name].free, self.part.usable_bytes - self.used - fixed)

    def allocate(
        self, nbytes: int, pool: str, *, granules: int = 1, bank: int | None = None
    ) -> Allocation:
        """Memory rounded up to the part's granule, marked unwritten in `granules` equal parts.

        Raises `OutOfDeviceMemory` naming the pool, the bytes asked and the bytes free.
        """
        size = self.rounded(nbytes)
        free = self.available(pool)
        address = self.pools[pool].take(size) if size <= free else None
        if address is None:
            raise OutOfDeviceMemory(
                pool,
                asked=size,
                free=min(free, self.pools[pool].largest),
                fix=_advice(pool, fixed=self.pools[pool].budget != _WINDOW),
            )
        self._fill_banks(size, bank)
        written = np.zeros(granules, dtype=bool)
        return Allocation(address, size, pool, bank, self, written)

    def give_back(self, allocation: Allocation) -> None:
        """Called by `Allocation.free`."""
        self.cells.pop(allocation.address, None)
        self.pools[allocation.pool].give(allocation.address, allocation.nbytes)
        self._fill_banks(-allocation.nbytes, allocation.bank)

    def rounded(self, nbytes: int) -> int:
        """`nbytes` as the device would really take."""
        unit = self.part.alignment
        return max(unit, -(-nbytes // unit) * unit)

    def _fill_banks(self, nbytes: int, group: int | None) -> None:
        banks = len(self.bank_bytes)
        if group is None:
            chosen = range(banks)
        else:
            first = group * BANKS_PER_GROUP % banks
            chosen = range(first, min(first + BANKS_PER_GROUP, banks))
        for bank in chosen:
            self.bank_bytes[bank] += nbytes // len(chosen)


def gib(nbytes: int) -> str:
    """Bytes for people."""
    return f"{nbytes / 2**30:.2f} GiB"


def _advice(pool: str, *, fixed: bool) -> str:
    own = f"raise {pool}_pool_gb, which fixes it, or " if fixed else ""
    return (
        own
        + {
            "static": "use a more strongly quantised model, or `halogen convert --quantize w8a8`",
            "dynamic": "lower kv_ratio, --pool-size or the context",
            "temp": "lower --max-batch-tokens",
            "graph": "capture fewer buckets: --backend-option graph_buckets=1,2,4",
        }[pool]
    )
