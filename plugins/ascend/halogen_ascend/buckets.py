"""Which decode batches share a captured step."""

from __future__ import annotations

import logging
from collections.abc import Hashable

import attrs
import numpy as np

from halogen_ascend.padding import table_width
from halogen_core.spi import ConfigError, StepBatch

log = logging.getLogger(__name__)


@attrs.define
class Buckets:
    """Batch sizes that have, or may get, a captured step."""

    sizes: tuple[int, ...]
    replays: int = 0
    _warned: set[int] = attrs.field(factory=set)

    def __attrs_post_init__(self) -> None:
        if list(self.sizes) != sorted(set(self.sizes)) or any(s < 1 for s in self.sizes):
            raise ConfigError(
                f"graph buckets {self.sizes} are not ascending positive sizes",
                code="HRT-7109",
                fix="for example --backend-option graph_buckets=1,2,4,8",
            )

    def size(self, sequences: int) -> int | None:
        """The smallest bucket that holds `sequences`; None, said once, when none does."""
        for size in self.sizes:
            if size >= sequences:
                return size
        if self.sizes and sequences not in self._warned:
            self._warned.add(sequences)
            log.warning(
                "no captured step holds %d sequences (buckets %s): they run eagerly, each op a "
                "launch; add a bucket with --backend-option graph_buckets",
                sequences,
                self.sizes,
            )
        return None

    def key(self, batch: StepBatch) -> Hashable | None:
        """Decode-only steps by bucket, table width and what sampling returns."""
        count = batch.num_sequences
        pure_decode = (
            count > 0
            and batch.num_tokens == count
            and batch.max_query_len == 1
            and batch.block_tables.shape[1] > 0
            and np.array_equal(batch.logit_rows, np.arange(count))
        )
        if not pure_decode or (size := self.size(count)) is None:
            return None
        width = table_width(batch.block_tables.shape[1])
        return "decode", size, width, batch.sampling.num_logprobs
