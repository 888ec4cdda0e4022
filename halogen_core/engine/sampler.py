"""Sampling policy on the host: what each row of a step asks of `Ops.sample`, and its number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_core.engine.grammar import AnswerGrammar
from halogen_core.engine.protocol import SamplingParams
from halogen_core.spi import SamplingBatch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float32]:
    """One number in [0, 1) per (seed, position), [R] float32; nothing else enters.

    SplitMix64 as a counter-based generator (Steele, Lea and Flood, OOPSLA 2014): the seed is mixed
    once to start a stream, the position selects from it.
    """
    with np.errstate(over="ignore"):
        raw = _mix(_mix(seeds) + _GOLDEN * (positions + np.uint64(1)))
    return (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


class TokenHistory:
    """Distinct tokens of a sequence and how often each was generated, grown token by token."""

    def __init__(self, prompt: Sequence[int]) -> None:
        found = dict.fromkeys(prompt)
        self._at = {token: index for index, token in enumerate(found)}
        self._ids = np.fromiter(found, np.int32, count=len(found))
        self._counts = np.zeros(len(found), np.int32)

    @property
    def ids(self) -> NDArray[np.int32]:
        return self._ids[: len(self._at)]

    @property
    def counts(self) -> NDArray[np.int32]:
        """Times generated, 0 for tokens of the prompt alone."""
        return self._counts[: len(self._at)]

    def record(self, token: int) -> None:
        """Note a generated token."""
        index = self._at.setdefault(token, len(self._at))
        if index == len(self._ids):
            room = max(64, index)
            self._ids = np.concatenate((self._ids, np.zeros(room, np.int32)))
            self._counts = np.concatenate((self._counts, np.zeros(room, np.int32)))
        self._ids[index] = token
        self._counts[index] += 1


@attrs.define(eq=False)
class RowSampler:
    """One sequence's sampling parameters and what its penalties remember."""

    params: SamplingParams
    seed: int
    end_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    num_logprobs: int = -1
    num_generated: int = 0
    history: TokenHistory | None = None
    """None: no penalty looks at it."""
    grammar: AnswerGrammar | None = None
    """None: every token is allowed."""

    @classmethod
    def start(
        cls,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        seed: int,
        end_token_ids: Iterable[int] = (),
        min_tokens: int = 0,
        num_logprobs: int = -1,
        grammar: AnswerGrammar | None = None,
    ) -> RowSampler:
        """A sampler for a new sequence; `seed` is used where the parameters name none."""
        penalised = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        return cls(
            params=params,
            seed=(params.seed if params.seed is not None else seed) & 0xFFFFFFFFFFFFFFFF,
            end_token_ids=tuple(end_token_ids),
            min_tokens=min_tokens,
            num_logprobs=num_logprobs,
            history=TokenHistory(prompt) if penalised else None,
            grammar=grammar,
        )

    def record(self, token: int) -> None:
        """Note a generated token."""
        self.num_generated += 1
        if self.history is not None:
            self.history.record(token)
        if self.grammar is not None:
            self.grammar.record(token, ends=token in self.end_token_ids)

    @property
    def complete(self) -> bool:
        """Whether the grammar, if there is one, lets nothing follow."""
        return self.grammar is not None and self.grammar.complete

    @property
    def next_is_independent(self) -> bool:
        """Whether the next row asks for the same, whatever token comes now."""
        return (
            self.history is None and self.grammar is None and self.num_generated >= self.min_tokens
        )

    @property
    def error(self) -> str:
        """Why the grammar cannot be followed any further; empty: it can."""
        return self.grammar.error if self.grammar is not None else ""

    def bias(self) -> dict[int, float]:
        """Logit bias now; end tokens are out of reach before `min_tokens`."""
        if self.num_generated >= self.min_tokens:
            return self.params.logit_bias
        return {**self.params.logit_bias, **dict.fromkeys(self.end_token_ids, -np.inf)}


@attrs.frozen
class SamplingRow:
    """A row of a step: whose it is, the position of the token it picks, a forced token or -1."""

    sampler: RowSampler
    position: int
    forced: int = -1


def sampling_batch(rows: Sequence[SamplingRow]) -> SamplingBatch:
    """The `SamplingBatch` of a step's rows, in order. Forced rows are neutral and greedy."""
    free = [r.sampler.params if r.forced < 0 else _NEUTRAL for r in rows]
    history = _history([r.sampler.history if r.forced < 0 else None for r in rows])
    bias = _csr([r.sampler.bias() if r.forced < 0 else {} for r in rows])
    temperature = _f32([p.temperature for p in free])
    return SamplingBatch(
        temperature=temperature,
        top_k=_i32([p.top_k for p in free]),
        top_p=_f32([p.top_p for p in free]),
        min_p=_f32([p.min_p for p in free]),
        repetition_penalty=_f32([p.repetition_penalty for p in free]),
        presence_penalty=_f32([p.presence_penalty for p in free]),
        frequency_penalty=_f32([p.frequency_penalty for p in free]),
        uniforms=_uniforms(rows) if temperature.any() else np.zeros(len(rows), np.float32),
        forced=_i32([r.forced for r in rows]),
        history_start=history[0],
        history_ids=history[1],
        history_counts=history[2],
        bias_start=bias[0],
        bias_ids=bias[1],
        bias_values=bias[2],
        mask=_mask(rows),
        num_logprobs=max((r.sampler.num_logprobs for r in rows), default=-1),
    )


_NEUTRAL = SamplingParams()


def _mask(rows: Sequence[SamplingRow]) -> NDArray[np.uint32] | None:
    """Tokens that grammars allow, [R, ceil(V / 32)]; rows without one allow all."""
    ruled = [(i, g) for i, r in enumerate(rows) if (g := r.sampler.grammar) and r.forced < 0]
    if not ruled:
        return None
    mask = np.full((len(rows), ruled[0][1].mask_words), 0xFFFFFFFF, np.uint32)
    for at, grammar in ruled:
        grammar.allow(mask[at])
    return mask


def _uniforms(rows: Sequence[SamplingRow]) -> NDArray[np.float32]:
    return uniforms(
        np.array([r.sampler.seed for r in rows], np.uint64),
        np.array([r.position for r in rows], np.uint64),
    )


def _history(
    histories: Sequence[TokenHistory | None],
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Row starts, ids and counts, one row per history."""
    known = [h for h in histories if h is not None]
    start = _starts([0 if h is None else len(h.ids) for h in histories])
    none = np.zeros(0, np.int32)
    ids = np.concatenate([none, *(h.ids for h in known)])
    return start, ids, np.concatenate([none, *(h.counts for h in known)])


def _csr(
    tables: Sequence[dict[int, float]],
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    start = _starts([len(t) for t in tables])
    ids = np.fromiter((k for t in tables for k in t), np.int32, count=int(start[-1]))
    values = np.fromiter((v for t in tables for v in t.values()), np.float32, count=int(start[-1]))
    return start, ids, values


def _starts(lengths: Sequence[int]) -> NDArray[np.int32]:
    start = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=start[1:])
    return start


def _f32(values: list[float]) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def _i32(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)
