"""A tiny seeded model as a GGUF file with a tokenizer, so that whole programs run on it."""

import gguf
import numpy as np
import pytest

from halogen_core.loader.tokenizer import TokenKind
from halogen_core.spi.testing import tiny_checkpoint

CONTROL = ["<|im_end|>", "<s>", "<|im_start|>"]
MERGED = ["he", "ll", "hell"]


def byte_pieces():
    """GPT-2's printable stand-ins for the 256 bytes, in the order of the bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(256, 512))
    return [chr(byte if byte in plain else next(rest)) for byte in range(256)]


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """Tokens 0 to 255 are the bytes, so random weights speak every kind of broken UTF-8."""
    pieces = byte_pieces() + CONTROL + MERGED
    checkpoint = tiny_checkpoint("llama-interleaved", vocab=len(pieces), context=1024, seed=3)
    path = tmp_path_factory.mktemp("models") / "tiny-bytes.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in checkpoint.hparams.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"llama.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(pieces)
    kinds = [TokenKind.NORMAL] * 256 + [TokenKind.CONTROL] * len(CONTROL)
    writer.add_token_types([int(k) for k in [*kinds, *[TokenKind.NORMAL] * len(MERGED)]])
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(256)
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name)
        writer.add_tensor(name, tensor.data.view(np.float32).reshape(tensor.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
