"""What both runtimes refuse before an operator would crash: checks on plain numbers.

Meta kernels accept a block size of 100 or a head dim of 80; the device does not. Limits are those
of the vendor's operator documents for CANN 8 and torch_npu 2.13.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from halogen_ascend.errors import LayoutError, OutOfRange
from halogen_core.spi import (
    AttentionSpec,
    ConfigError,
    KVSpec,
    UnsupportedOp,
)

BLOCK_SIZES = (128, 256, 384, 512)
"""Paged prefill wants 128 to 512 in multiples of 128; one size serves decode too."""
FUSED_HEAD_DIMS = (64, 128, 192)
"""What fused attention takes in layout TND."""
MAX_SEQUENCES = 4096
MAX_HEADS = 256
MAX_GROUP = 64
"""Query heads per KV head."""
MAX_KV_WIDTH = 65535
MAX_QUANT_COLUMNS = 65535


def check_block_size(size: int) -> None:
    """Raises `ConfigError` (HRT-7108) for a KV block that the part cannot do."""
    if size not in BLOCK_SIZES:
        raise ConfigError(
            f"block size {size} is impossible; `ascend` wants one of "
            f"{', '.join(map(str, BLOCK_SIZES))}",
            code="HRT-7108",
            fix="set --block-size 128",
        )


def check_kv(spec: KVSpec, dtypes: Collection[str]) -> None:
    """Raises `ConfigError` (HRT-7108) for a block size or a dtype that the part cannot do."""
    check_block_size(spec.block_size)
    if spec.dtype not in dtypes:
        raise ConfigError(
            f"KV dtype `{spec.dtype}` is not supported; `ascend` stores {', '.join(dtypes)}",
            code="HRT-7108",
            fix="set --kv-dtype f16",
        )


def attention_denials(spec: AttentionSpec) -> list[str]:
    """Why the fused operator cannot run this layer; it then runs composed, and is counted."""
    said = []
    if spec.head_dim not in FUSED_HEAD_DIMS:
        said.append(f"head dim {spec.head_dim} is not among {FUSED_HEAD_DIMS} in layout TND")
    if spec.softcap is not None:
        said.append("the fused operator has no softcap")
    if spec.num_heads // spec.num_kv_heads > MAX_GROUP:
        said.append(f"{spec.num_heads // spec.num_kv_heads} query heads per KV head > {MAX_GROUP}")
    if spec.num_heads > MAX_HEADS:
        said.append(f"{spec.num_heads} heads > {MAX_HEADS}")
    if spec.num_kv_heads * spec.head_dim > MAX_KV_WIDTH:
        said.append(f"KV width {spec.num_kv_heads * spec.head_dim} > {MAX_KV_WIDTH}")
    return said


def check_lengths(query_ends: Sequence[int], kv_lengths: Sequence[int], tokens: int) -> None:
    """Host lists of a paged TND call: cumulative query ends, per-request KV lengths."""
    if len(query_ends) != len(kv_lengths):
        raise OutOfRange(
            f"`attention`: {len(query_ends)} query ends for {len(kv_lengths)} KV lengths",
            fix="every host list of a step has one entry per sequence",
        )
    if len(kv_lengths) > MAX_SEQUENCES:
        raise OutOfRange(
            f"`attention`: {len(kv_lengths)} sequences; the operator takes {MAX_SEQUENCES}",
            fix="lower --max-batch",
        )
    counts = [b - a for a, b in zip([0, *query_ends], query_ends, strict=False)]
    if min(counts, default=0) < 0 or (query_ends and query_ends[-1] != tokens):
        raise OutOfRange(
            f"`attention`: query ends {list(query_ends)} do not ascend to {tokens} tokens",
            fix="state of an earlier step was kept; rebuild the batch",
        )


def check_quant_matmul(n: int, k: int) -> None:
    """Columns of an int8 product; wider weights are split in two by the caller."""
    if n > MAX_QUANT_COLUMNS or k > MAX_QUANT_COLUMNS:
        raise UnsupportedOp(
            f"an int8 weight of [{k}, {n}] exceeds {MAX_QUANT_COLUMNS} in a dimension",
            fix="split it, or keep it in 16 bits",
        )


def check_nz_allowed(dtype: str) -> None:
    """FRACTAL_NZ is for int8 weights here, never for float32."""
    if dtype == "float32":
        raise LayoutError(
            "a float32 weight cannot be cast to FRACTAL_NZ",
            fix="keep it ND, or store it in 16 bits",
        )
