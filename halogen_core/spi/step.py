"""One step as it crosses the seam: the flat batch, its device form, and what sampling leaves.

Shape letters as in `operations.py`.
"""

from __future__ import annotations

from typing import Any, Generic

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_core.spi.arrays import Array, Float32, Int32, Int64


@attrs.frozen(kw_only=True, eq=False)
class Carried:
    """Tokens of a step that only the device knows yet; for backends that run ahead."""

    rows: Int32
    """[T] the row of `tokens` that stands here; -1: `StepBatch.token_ids` holds the token."""
    tokens: Any
    """The `Sampled.token_ids` of the step before, on the device."""


@attrs.frozen(kw_only=True, eq=False)
class StepBatch:
    """One step on the host side, flat, built by the core. int32 unless noted.

    Sequences' tokens lie one after another: sequence s owns rows query_start_loc[s] to
    query_start_loc[s + 1]. A token's KV goes to `slot_mapping` = block * B + offset.
    """

    token_ids: Int32
    """[T]"""
    positions: Int32
    """[T]"""
    slot_mapping: Int64
    """[T]"""
    query_start_loc: Int32
    """[S + 1]"""
    seq_lens: Int32
    """[S] tokens of the sequence in the KV cache after this step's writes."""
    block_tables: Int32
    """[S, M], unused entries are -1."""
    logit_rows: Int32
    """[R] rows of T whose logits are wanted, ascending."""
    sampling: SamplingBatch
    """Of the R rows."""
    carried: Carried | None = None
    """None: every token is known here. Only backends that run ahead ever get one."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.seq_lens)

    @property
    def max_query_len(self) -> int:
        return int(np.diff(self.query_start_loc).max(initial=0))

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens.max(initial=0))


@attrs.frozen(kw_only=True, eq=False)
class StepMeta(Generic[Array]):
    """One step as ops see it: device arrays beside the host batch.

    Some vendors want lengths on the host, some on the device: both are here.
    """

    host: StepBatch
    token_ids: Array
    positions: Array
    slot_mapping: Array
    query_start_loc: Array
    seq_lens: Array
    block_tables: Array
    logit_rows: Array
    sampling: Any
    """The backend's own device form of `host.sampling`."""


@attrs.frozen(kw_only=True, eq=False)
class SamplingBatch:
    """How each of R rows picks its token. Order of application: penalties, bias, mask,
    temperature, softmax, top-k, top-p, min-p, then inverse CDF in token-id order with `uniforms`.
    Each truncation works on what the one before it left, renormalised; among equally likely tokens
    the lower id stays first. A row that is not finite gives token -1.

    Neutral values: temperature 0 is greedy (lowest id wins a tie), top_k 0, top_p 1, min_p 0,
    repetition_penalty 1, presence and frequency penalty 0.
    """

    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    repetition_penalty: Float32
    presence_penalty: Float32
    frequency_penalty: Float32
    uniforms: Float32
    """[R] in [0, 1), made by the core from (seed, sequence, position): a seed gives the same
    token whatever shares the batch, and no device needs a random generator."""
    forced: Int32
    """[R] token to report instead of sampling (prompt log-probabilities); -1: sample."""
    history_start: Int32
    """[R + 1] rows into `history_ids`."""
    history_ids: Int32
    """Distinct tokens seen so far by penalised rows."""
    history_counts: Int32
    """Times each was generated (0: only in the prompt). Repetition penalty looks at presence in
    either, presence and frequency penalties at generated counts."""
    bias_start: Int32
    """[R + 1] rows into `bias_ids`."""
    bias_ids: Int32
    bias_values: Float32
    mask: NDArray[np.uint32] | None = None
    """[R, ceil(V / 32)] allowed tokens, little-endian bits (grammars); None: all."""
    num_logprobs: int = -1
    """-1: none, 0: of the chosen token, n: also the n most likely."""

    @property
    def num_rows(self) -> int:
        return len(self.temperature)

    @property
    def all_greedy(self) -> bool:
        return not self.temperature.any()


@attrs.frozen(kw_only=True, eq=False)
class Sampled(Generic[Array]):
    """What `sample` leaves on the device; downloading it is the step's one synchronisation.

    Log-probabilities are of the model's own distribution (before penalties and temperature).
    """

    token_ids: Array
    """[R] int32"""
    logprobs: Array | None = None
    """[R] float32, of the chosen token."""
    top_ids: Array | None = None
    """[R, n] int32, most likely first."""
    top_logprobs: Array | None = None
    """[R, n] float32"""
