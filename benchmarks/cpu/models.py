"""The files that are compared on: two packages' own, and SmolLM2 requantised from its Q4_1."""

import ctypes as C
from pathlib import Path

import gguf
import numpy as np

from halogen_core.cli.pull import pull_model
from halogen_cpu_ggml import binding

PULLED = Path.home() / ".cache/halogen/test-models"
MADE = Path.home() / ".cache/halogen/bench-models"
PACKAGES = {"smollm2-q4_1": "smollm2-135m", "gemma3-270m": "gemma3-270m"}
REQUANTISED = ("smollm2-q4_k_m", "smollm2-q8_0", "smollm2-f16")
NAMES = ("smollm2-q4_1", *REQUANTISED, "gemma3-270m")
FILE_TYPE = {"smollm2-q4_k_m": 15, "smollm2-q8_0": 7, "smollm2-f16": 1}
Kind = gguf.GGMLQuantizationType


def origin(name):
    """How the file came about, for the result."""
    if name in PACKAGES:
        return f"as pulled: {PACKAGES[name]}"
    return (
        "SmolLM2-135M-Instruct Q4_1 dequantised by gguf-py and quantised again with ggml's "
        f"ggml_quantize_chunk (no importance matrix), {name.split('-')[1]} by llama.cpp's rules; "
        "benchmarks/cpu/models.py"
    )


def path_of(name):
    """The file, made when it is first asked for."""
    if name not in NAMES:
        return Path(name)
    if name in PACKAGES:
        return Path(pull_model(PACKAGES[name], PULLED))
    target = MADE / f"{name}.gguf"
    if not target.exists():
        MADE.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        requantise(path_of("smollm2-q4_1"), part, name)
        part.rename(target)
    return target


def more_bits(layer, layers):
    """llama.cpp's `use_more_bits`."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def kind_of(name, tensor, layers):
    """The type of a matrix; a row that is not whole k-blocks takes llama.cpp's substitutes."""
    if name == "smollm2-f16":
        return Kind.F16
    if name == "smollm2-q8_0":
        return Kind.Q8_0
    better = tensor.name == "token_embd.weight"
    if tensor.name.split(".")[-2] in ("attn_v", "ffn_down"):
        better = more_bits(int(tensor.name.split(".")[1]), layers)
    if int(tensor.shape[0]) % 256 == 0:
        return Kind.Q6_K if better else Kind.Q4_K
    return Kind.Q8_0 if better else Kind.Q5_0


def quantised(values, kind):
    """Rows of float32 [n, k] in `kind`, by ggml."""
    if kind is Kind.F16:
        return values.astype(np.float16)
    lib = binding.load()
    block, size = gguf.GGML_QUANT_SIZES[kind]
    n, k = values.shape
    out = np.zeros((n, k // block * size), np.uint8)
    values = np.ascontiguousarray(values, np.float32)
    quantize = lib.fn["quantize_chunk"]
    quantize(int(kind), values.ctypes.data, out.ctypes.data, 0, n, k, C.c_void_p(None))
    return out


def requantise(source, target, name):
    """Write `source` again with other matrices; vectors and metadata stay."""
    reader = gguf.GGUFReader(source)
    arch = reader.get_field("general.architecture").contents()
    layers = reader.get_field(f"{arch}.block_count").contents()
    writer = gguf.GGUFWriter(target, arch)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = FILE_TYPE[name] if field.name == "general.file_type" else field.contents()
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, kind, inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
            continue
        kind = kind_of(name, tensor, layers)
        writer.add_tensor(tensor.name, quantised(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    for each in NAMES:
        print(each, path_of(each))
