"""Mutants of sample: the step's sampling record, changed before the draw."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from halogen_conformance.mutants.registry import mutant


def _with_sampling(backend: Any, change: Any) -> None:
    right = backend.ops.sample

    def sample(logits, meta):
        batch = attrs.evolve(meta.host, sampling=change(meta.host.sampling))
        return right(logits, backend.upload_step(batch))

    backend.ops.sample = sample


@mutant("L1/sample/uniforms-matter@f32")
def seed_ignored(backend):
    """The uniform numbers are replaced by one constant"""
    _with_sampling(backend, lambda s: attrs.evolve(s, uniforms=np.full_like(s.uniforms, 0.5)))


@mutant("L1/sample/temperature@f32", "L1/sample/hot@f32")
def temperature_inverted(backend):
    """Logits are multiplied by the temperature"""

    def guarded(s):
        with np.errstate(divide="ignore"):
            return attrs.evolve(
                s, temperature=np.where(s.temperature > 0, 1 / s.temperature, 0).astype(np.float32)
            )

    _with_sampling(backend, guarded)


@mutant("L1/sample/top-k@f32")
def top_k_one_more(backend):
    """k + 1 tokens are kept"""
    _with_sampling(backend, lambda s: attrs.evolve(s, top_k=np.where(s.top_k > 0, s.top_k + 1, 0)))


@mutant("L1/sample/top-p@f32")
def top_p_ignored(backend):
    """Nucleus sampling is not applied"""
    _with_sampling(backend, lambda s: attrs.evolve(s, top_p=np.ones_like(s.top_p)))


@mutant("L1/sample/min-p@f32")
def min_p_ignored(backend):
    """Unlikely tokens are not cut"""
    _with_sampling(backend, lambda s: attrs.evolve(s, min_p=np.zeros_like(s.min_p)))


@mutant("L1/sample/presence@f32")
def presence_counts_the_prompt(backend):
    """Tokens of the prompt are penalised for presence"""
    _with_sampling(
        backend, lambda s: attrs.evolve(s, history_counts=np.maximum(s.history_counts, 1))
    )


@mutant("L1/sample/frequency@f32")
def frequency_ignores_counts(backend):
    """A token is penalised once however often it came"""
    _with_sampling(
        backend, lambda s: attrs.evolve(s, history_counts=np.minimum(s.history_counts, 1))
    )


@mutant("L1/sample/repetition@f32")
def repetition_divides_negative_logits(backend):
    """Negative logits are divided too, which makes repeated tokens likelier"""
    right = backend.ops.sample

    def sample(logits, meta):
        s = meta.host.sampling
        rows = np.repeat(np.arange(s.num_rows), np.diff(s.history_start))
        changed = logits.clone()
        for row, token in zip(rows, s.history_ids, strict=True):
            changed[row, token] /= float(s.repetition_penalty[row])
        neutral = attrs.evolve(s, repetition_penalty=np.ones_like(s.repetition_penalty))
        return right(changed, backend.upload_step(attrs.evolve(meta.host, sampling=neutral)))

    backend.ops.sample = sample


@mutant("L1/sample/mask@f32", "L1/sample/mask-drawn@f32")
def mask_bits_reversed(backend):
    """Mask words are read from the highest bit"""

    def change(s):
        if s.mask is None:
            return s
        bits = np.unpackbits(s.mask.view(np.uint8), axis=1, bitorder="little")
        words = bits.reshape(len(s.mask), -1, 32)[:, :, ::-1].reshape(len(s.mask), -1)
        return attrs.evolve(s, mask=np.packbits(words, axis=1, bitorder="little").view(np.uint32))

    _with_sampling(backend, change)


@mutant("L1/sample/forced@f32")
def forced_token_ignored(backend):
    """A forced token is sampled all the same"""
    _with_sampling(backend, lambda s: attrs.evolve(s, forced=np.full_like(s.forced, -1)))


@mutant("L1/sample/bias@f32")
def bias_lost_in_sampling(backend):
    """logit_bias is ignored"""
    _with_sampling(backend, lambda s: attrs.evolve(s, bias_values=np.zeros_like(s.bias_values)))


@mutant("L1/sample/mixed-rows@f32")
def first_rows_policy_for_all(backend):
    """Every row is sampled with the first row's temperature"""
    _with_sampling(
        backend,
        lambda s: attrs.evolve(s, temperature=np.full_like(s.temperature, s.temperature[0])),
    )


@mutant("L1/sample/logprobs@f32")
def logprobs_after_temperature(backend):
    """Log-probabilities are of the distribution after temperature"""
    right = backend.ops.sample

    def sample(logits, meta):
        warm = torch.from_numpy(np.where(meta.host.sampling.temperature > 0, 0.3, 1)).float()
        scaled = right(logits / warm[: len(logits), None], meta)
        return attrs.evolve(right(logits, meta), logprobs=scaled.logprobs)

    backend.ops.sample = sample


@mutant("L1/sample/ties@f32")
def ties_go_to_the_last_token(backend):
    """Among equal logits the highest id wins"""
    right = backend.ops.sample

    def sample(logits, meta):
        sampled = right(logits.flip(1), meta)
        return attrs.evolve(sampled, token_ids=logits.shape[1] - 1 - sampled.token_ids)

    backend.ops.sample = sample


@mutant("L1/sample/alone-or-not@f32")
def token_depends_on_company(backend):
    """A row's uniform number is shifted by how many rows share the step"""
    _with_sampling(
        backend,
        lambda s: attrs.evolve(
            s, uniforms=((s.uniforms + 0.07 * (s.num_rows - 1)) % 1).astype(np.float32)
        ),
    )


@mutant("L1/sample/greedy@f32")
def logits_changed_in_place(backend):
    """Sampling writes into the logits it was given"""
    right = backend.ops.sample

    def sample(logits, meta):
        sampled = right(logits, meta)
        logits.sub_(logits.max())
        return sampled

    backend.ops.sample = sample


@mutant("L1/sample/greedy@f32")
def token_ids_of_another_dtype(backend):
    """Token ids come as int64"""
    right = backend.ops.sample

    def sample(logits, meta):
        sampled = right(logits, meta)
        return attrs.evolve(sampled, token_ids=sampled.token_ids.long())

    backend.ops.sample = sample
