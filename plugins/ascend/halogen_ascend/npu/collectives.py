"""Ranks of one tensor-parallel group, a process and a device each, over HCCL.

No engine reaches this: SPI 1.0 has no collectives, and capabilities claim none. It holds what a
later SPI would call, proved with two processes on another transport.
"""

from __future__ import annotations

from datetime import timedelta

import attrs
import torch.distributed as dist
from torch import Tensor

from halogen_ascend.errors import CollectiveError
from halogen_core.spi import DeviceLost, PackedWeight, TorchOps

TRANSPORT = "hccl"
"""The backend that torch_npu registers for device `npu`."""
TIMEOUT = timedelta(seconds=60)
"""A rank that waits longer reports whom it waits for, instead of hanging."""


@attrs.frozen(eq=False)
class RankGroup:
    """This process's place among `size` ranks."""

    rank: int
    size: int

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        address: str,
        *,
        transport: str = TRANSPORT,
        timeout: timedelta = TIMEOUT,
    ) -> RankGroup:
        """Meet the other ranks at `address` (`tcp://HOST:PORT` or `file:///PATH`).

        Raises `CollectiveError` when they do not come, or when the transport is not there.
        """
        try:
            if not dist.is_backend_available(transport):
                raise ValueError("torch knows no such transport")
            dist.init_process_group(
                transport, init_method=address, rank=rank, world_size=size, timeout=timeout
            )
        except (RuntimeError, ValueError) as exc:
            raise CollectiveError(
                f"rank {rank} of {size} could not join a `{transport}` group at {address}: {exc}",
                fix="start all ranks with the same size and address, one device each",
            ) from exc
        return cls(rank, size)

    def sum(self, x: Tensor, name: str) -> Tensor:
        """`x` summed over the ranks, in place; `name` tells in errors which one it was.

        Raises `DeviceLost` when a rank is gone or late: its partial result is gone too.
        """
        try:
            dist.all_reduce(x)
        except RuntimeError as exc:
            raise DeviceLost(
                f"rank {self.rank} of {self.size}: sum of `{name}` failed: {exc}",
                fix="restart every rank; one alone cannot rejoin",
            ) from exc
        return x

    def leave(self) -> None:
        """Give the group up; the process may join another."""
        dist.destroy_process_group()


def share_of(width: int, rank: int, size: int) -> slice:
    """The part of an inner dimension of `width` that `rank` multiplies; shares differ by one."""
    return slice(width * rank // size, width * (rank + 1) // size)


def row_parallel_linear(
    ops: TorchOps,
    x: Tensor,
    weight: PackedWeight[Tensor],
    group: RankGroup,
    *,
    name: str,
    bias: PackedWeight[Tensor] | None = None,
) -> Tensor:
    """X [T, K share] by this rank's columns of a weight [N, K], summed: [T, N] on every rank.

    Megatron-LM's row-parallel layer (Shoeybi et al., 2019); the bias is added once, by rank 0.
    """
    return group.sum(ops.linear(x, weight, bias=bias if group.rank == 0 else None), name)
