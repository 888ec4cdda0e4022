"""A model whose answers prove whose tokens they were made from.

Every printable character has one of eight colours. Attention is uniform over the sequence and
carries the mean colour; the logit of a colour's favourite character is 100 times the share of the
colour, against an alarm character with a constant logit of 98.5. A sequence of one colour goes on
with that favourite and a log-probability that does not depend on its length; one foreign token
among a hundred shows in it, one among fifty makes the alarm win. So each answer is checked without
a reference run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

COLOURS = 8
ALARM = ord("~")
FIRST, LAST = 33, 125
FAVOURITE = 10
"""Characters 80 to 87, one of each colour."""
CONTROL = ("<|im_end|>", "<s>")
HIDDEN, BIAS, MEAN = 64, 16, 8
"""Width; the constant dim; where the mean colour lies."""


def alphabet(colour: int) -> list[int]:
    """The tokens of a colour."""
    return [t for t in range(FIRST, LAST + 1) if t % COLOURS == colour]


def prompt(colour: int, length: int, rng: np.random.Generator) -> list[int]:
    """Tokens of one colour."""
    return [int(t) for t in rng.choice(alphabet(colour), length)]


def write_canary(path: Path, context: int = 1024) -> None:
    """The model as a GGUF file with a tokenizer in which token i is byte i."""
    writer = GGUFWriter(path, "llama")
    pieces = [*_byte_pieces(), *CONTROL]
    for key, value in _hparams(context, len(pieces)).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"llama.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(pieces)
    writer.add_token_types([1] * 256 + [3] * len(CONTROL))
    writer.add_token_merges([])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(256)
    for name, values in tensors(len(pieces)).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(vocab: int) -> dict[str, NDArray[np.float32]]:
    """All weights; zero but for the few that make the canary."""

    def zeros(*shape: int) -> NDArray[np.float32]:
        return np.zeros(shape, np.float32)

    embedding, output = zeros(vocab, HIDDEN), zeros(vocab, HIDDEN)
    embedding[:, BIAS] = 1
    output[:, BIAS] = -25
    for token in range(FIRST, LAST + 1):
        embedding[token, token % COLOURS] = 1
        # the final norm makes the mean colour 2^2.5 and the constant 4 for a sequence of one colour
        output[token, MEAN + token % COLOURS] = 100 / 2**2.5
        output[token, BIAS] = 0 if token // COLOURS == FAVOURITE else -3 / 4
    output[ALARM, BIAS] = 98.5 / 4
    value, out = zeros(HIDDEN, HIDDEN), zeros(HIDDEN, HIDDEN)
    for colour in range(COLOURS):
        value[colour, colour] = 1
        out[MEAN + colour, colour] = 0.25
    ones = np.ones(HIDDEN, np.float32)
    return {
        "token_embd.weight": embedding,
        "blk.0.attn_norm.weight": ones,
        "blk.0.attn_q.weight": zeros(HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": zeros(HIDDEN, HIDDEN),
        "blk.0.attn_v.weight": value,
        "blk.0.attn_output.weight": out,
        "blk.0.ffn_norm.weight": ones,
        "blk.0.ffn_gate.weight": zeros(HIDDEN, HIDDEN),
        "blk.0.ffn_up.weight": zeros(HIDDEN, HIDDEN),
        "blk.0.ffn_down.weight": zeros(HIDDEN, HIDDEN),
        "output_norm.weight": ones,
        "output.weight": output,
    }


def _hparams(context: int, vocab: int) -> dict[str, Any]:
    return {
        "block_count": 1,
        "context_length": context,
        "embedding_length": HIDDEN,
        "feed_forward_length": HIDDEN,
        "vocab_size": vocab,
        "attention.head_count": 1,
        "attention.head_count_kv": 1,
        "attention.key_length": HIDDEN,
        "attention.value_length": HIDDEN,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": HIDDEN,
        "rope.freq_base": 10000.0,
    }


def _byte_pieces() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in the order of the bytes."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(256, 512))
    return [chr(byte if byte in plain else next(rest)) for byte in range(256)]
