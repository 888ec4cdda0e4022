"""Collectives over simulated ranks: the values, and the order that real ranks would hang on.

Ranks are threads of control that offer one collective each; nothing completes until all offer the
same. A rank with no work must offer a dummy, and a group in which somebody cannot is an error with
the ledger, never a hang.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from halogen_ascend.errors import CollectiveError
from halogen_ascend.sim.buffer import DeviceBuffer
from halogen_ascend.sim.launcher import Packed
from halogen_ascend.sim.ops import SimOps

LINK_BYTES = 56e9
"""Assumed bytes per second between two parts."""
LINK_S = 3e-6
"""Assumed seconds of one message between them, however small."""


def ring_seconds(nbytes: int, ranks: int) -> float:
    """Time of a ring all-reduce: each rank passes 2 (n - 1) parts of 1 / n on (Patarasu & Yuan,
    2009). With one rank nothing is sent.
    """
    return 2 * (ranks - 1) * (LINK_S + nbytes / ranks / LINK_BYTES)


@attrs.frozen
class Offer:
    """What one rank is about to do; `buffer` None is an idle rank's dummy."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    buffer: DeviceBuffer | None


@attrs.define
class Group:
    """Ranks 0 to size - 1 of one parallel group."""

    size: int
    _queues: list[list[Offer]] = attrs.field(init=False)
    log: list[str] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self._queues = [[] for _ in range(self.size)]

    def offer(self, rank: int, kind: str, name: str, buffer: DeviceBuffer) -> None:
        """Rank `rank` wants `kind` (`all_reduce`) over `buffer`, called `name` in messages."""
        self._queues[rank].append(Offer(kind, name, buffer.shape, buffer.dtype, buffer))
        self._advance()

    def offer_dummy(self, rank: int, kind: str, name: str, like: DeviceBuffer) -> None:
        """An idle rank takes part with zeros, as an empty step of a data-parallel engine must."""
        self._queues[rank].append(Offer(kind, name, like.shape, like.dtype, None))
        self._advance()

    def finish(self) -> None:
        """All ranks are done offering; raises `CollectiveError` where one still waits."""
        waiting = {r: q[0] for r, q in enumerate(self._queues) if q}
        if waiting:
            idle = [r for r in range(self.size) if r not in waiting]
            told = ", ".join(f"rank {r} in `{o.kind}` of `{o.name}`" for r, o in waiting.items())
            raise CollectiveError(
                f"{told} waits for ranks {idle}, which offer nothing: a deadlock",
                fix="idle ranks must run a dummy step",
            )

    def _advance(self) -> None:
        while all(self._queues):
            offers = [queue.pop(0) for queue in self._queues]
            first = offers[0]
            for rank, offer in enumerate(offers):
                same = (offer.kind, offer.name, offer.shape, offer.dtype)
                if same != (first.kind, first.name, first.shape, first.dtype):
                    raise CollectiveError(
                        f"rank 0 offers `{first.kind}` of `{first.name}` {first.shape}, rank "
                        f"{rank} offers `{offer.kind}` of `{offer.name}` {offer.shape}",
                        fix="every rank runs the same sequence of collectives",
                    )
            self._all_reduce(offers)
            self.log.append(f"{first.kind}:{first.name}")

    def _all_reduce(self, offers: list[Offer]) -> None:
        """Sum in rank order in float32, so that every run rounds alike."""
        live = [o.buffer for o in offers if o.buffer is not None]
        if not live:
            return
        total = torch.stack([b.device.read(b, "all_reduce", "x").float() for b in live]).sum(0)
        # nobody is done before the last one came
        done = max(b.device.now for b in live) + ring_seconds(live[0].nbytes, self.size)
        for buffer in live:
            buffer.device.write(buffer, "all_reduce").copy_(total)
            buffer.device.now = done


def row_parallel_linear(
    ranks: Sequence[SimOps], inputs: Sequence[DeviceBuffer], weights: Sequence[Packed], group: Group
) -> list[DeviceBuffer]:
    """Rank r's x [T, K share] by its columns of a weight [N, K], summed: [T, N] on every rank.

    Megatron-LM's row-parallel layer (Shoeybi et al., 2019).
    """
    made = [ops.linear(x, weight) for ops, x, weight in zip(ranks, inputs, weights, strict=True)]
    for rank, partial in enumerate(made):
        group.offer(rank, "all_reduce", "row_parallel_linear", partial)
    return made
