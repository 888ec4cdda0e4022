"""Sampling in float64, one row at a time: which token a row must pick, and from what distribution."""

from __future__ import annotations

import attrs
import numpy as np

from halogen_conformance.oracle.numbers import Values
from halogen_conformance.oracle.operations import log_softmax


@attrs.frozen(kw_only=True)
class Policy:
    """How one row samples; the fields and neutral values of `SamplingBatch`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    uniform: float = 0.0
    forced: int = -1
    history: tuple[tuple[int, int], ...] = ()
    """(token, times generated)."""
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None


def adjusted(logits: Values, policy: Policy) -> Values:
    """Logits [V] after penalties, bias and mask."""
    out = np.array(logits, np.float64)
    for token, count in policy.history:
        value, penalty = out[token], policy.repetition_penalty
        out[token] = value / penalty if value > 0 else value * penalty
        out[token] -= policy.frequency_penalty * count + policy.presence_penalty * (count > 0)
    for token, value in policy.bias:
        out[token] += value
    if policy.allowed is not None:
        barred = np.ones(len(out), bool)
        barred[list(policy.allowed)] = False
        out[barred] = -np.inf
    return out


def distribution(logits: Values, policy: Policy) -> Values:
    """Probabilities [V] that the row draws from (temperature > 0), normalised."""
    p = np.exp(log_softmax(adjusted(logits, policy) / policy.temperature))
    order = np.argsort(-p, kind="stable")
    if policy.top_k > 0:
        p[order[policy.top_k :]] = 0
        p /= p.sum()
    if policy.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= policy.top_p]] = 0
        p /= p.sum()
    if policy.min_p > 0:
        p[p < policy.min_p * p.max()] = 0
        p /= p.sum()
    return p


def pick(logits: Values, policy: Policy) -> int:
    """The token of the row."""
    if policy.forced >= 0:
        return policy.forced
    if policy.temperature == 0:
        return int(np.argmax(adjusted(logits, policy)))
    running = np.cumsum(distribution(logits, policy))
    return int(np.searchsorted(running, policy.uniform * running[-1], side="right"))


def aim_at(logits: Values, policy: Policy, token: int) -> Policy:
    """The policy with the uniform number that falls in the middle of `token`'s share."""
    p = distribution(logits, policy)
    middle = p[:token].sum() + p[token] / 2
    return attrs.evolve(policy, uniform=float(np.float32(middle)))
