"""The launches we ship, as calls of the host wrappers on meta tensors (nothing is allocated).

Shapes are those of real models: Qwen2.5-7B (28/4 heads of 128), SmolLM2 (9/3 of 64), Gemma 3
(4/1 of
256), Qwen3-30B-A3B's experts. A case's name is op, format and shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import torch
import triton
from torch import Tensor

from halogen_triton.attention import (
    STORES,
    HeadShape,
    LayerKV,
    Sequences,
    attention,
    attention_plan,
)
from halogen_triton.dense import Normed, Product, dense, dense_rule, to_heads, to_stream
from halogen_triton.int8 import Int8, gated_rounded, rms_norm_rounded
from halogen_triton.launch import Rule, Tuning, tuning
from halogen_triton.linear import ExpertRows, embedding_rows, expert_linear, gates, linear
from halogen_triton.planes import PLANE_FORMATS, Planes
from halogen_triton.pointwise import Rotation, gated_act, qkv_rope_store, rms_norm
from halogen_triton.sampling import FIELDS, DrawTensors, draw
from halogen_triton.tiles import Tiles, fields_of

_NEWEST = ("MXFP4", "INT4", "W8A16")
Case = tuple[str, Callable[[], object]]
_HEADS = {"28-4x128": (28, 4, 128), "9-3x64": (9, 3, 64), "4-1x256": (4, 1, 256)}
_STORAGE = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "q8_0": torch.int8,
    "f8_e5m2": torch.uint8,
}


def shipped(arch: str) -> Iterator[Case]:
    """Every case for an arch."""
    table = tuning(arch)
    yield from _attention(table)
    yield from _linear(table)
    yield from _small(table)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _ints(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.int32)


def _layer_kv(store: str, hkv: int, d: int) -> LayerKV:
    """A layer of a pool for 28, whose codes or elements are over 2 GiB."""
    lead = (28, 4096, 2, hkv, 64)
    scales = _meta(*lead, d // 32, dtype=torch.float16)[0] if store == "q8_0" else None
    data = _meta(*lead, d, dtype=_STORAGE[store])[0]
    return LayerKV(data=data, scales=scales, store=STORES[store])


def _attention(table: Tuning) -> Iterator[Case]:
    for heads, (hq, hkv, d) in _HEADS.items():
        options = [("bf16", {}), ("q8_0", {}), ("f8_e5m2", {})]
        if d == 256:
            options = [("bf16", {"window": 512}), ("bf16", {}), ("q8_0", {})]
        for store, extra in options:
            shape = HeadShape(num_heads=hq, num_kv_heads=hkv, head_dim=d, scale=d**-0.5, **extra)
            kv = _layer_kv(store, hkv, d)
            plan = attention_plan(table, d, quantised=store == "q8_0")
            label = f"{store} {heads}" + ("".join(f" {key}" for key in extra))
            kinds = [("prefill", True)]
            if plan.max_decode:
                kinds = [("decode", True), *[("direct", False)][: plan.direct], *kinds]
            if plan.hopper is not None and d == 128 and store == "bf16":
                kinds.append(("hopper", True))
            for kind, flash in kinds:
                own = plan if kind == "hopper" else attrs.evolve(plan, hopper=None)
                decodes = kind in ("decode", "direct")
                tokens = 8 if decodes else 512
                sequences = Sequences(
                    starts=_ints(9),
                    seq_lens=_ints(8),
                    tables=_ints(8, 256),
                    num_tokens=tokens,
                    max_query_len=tokens // 8,
                    has_decodes=decodes,
                    has_prefills=not decodes,
                    flash=flash,
                )
                q = _meta(tokens, hq * d)
                yield (
                    f"attention {kind} {label}",
                    lambda q=q, kv=kv, s=sequences, shape=shape, plan=own: attention(
                        q, kv, s, shape, plan
                    ),
                )


def meta_planes(name: str, *shape: int) -> Planes:
    """Planes of a format without storage."""
    fmt, (*lead, k) = PLANE_FORMATS[name], shape
    half = torch.float16
    codes = _meta(*lead, k, dtype=torch.int8) if fmt.index == 5 else _ints(*lead, k // 8)
    kinds = {
        1: _meta(*lead, k // 32, dtype=half),
        2: _meta(*lead, k // 16, dtype=half),
        3: _meta(*lead, k // 16, dtype=torch.uint8),
        4: _meta(*lead, k // 16, dtype=torch.int8),
        5: _meta(*lead, k // 32, dtype=half),
        6: _meta(*lead, k // 128, dtype=half),
        7: _meta(*lead, k // 32, dtype=torch.uint8),
    }
    scales = kinds[fmt.index] if name != "W8A16" else _meta(*lead, 1, dtype=torch.float32)
    supers = {
        3: _meta(*lead, k // 128, dtype=half),
        4: _meta(*lead, k // 256, dtype=half),
        6: _meta(*lead, k // 128, dtype=torch.uint8),
    }
    return Planes(
        format=fmt,
        shape=shape,
        codes=codes,
        high=_ints(*lead, k // 32 * fmt.high_bits) if fmt.high_bits else codes,
        scales=scales,
        supers=supers.get(fmt.index, scales),
        group={"INT4": 128, "W8A16": k}.get(name, 32),
    )


def meta_tiles(name: str, n: int, k: int) -> Tiles:
    """Tiles of a format without storage."""
    planes = meta_planes(name, n, k)
    fmt, half = planes.format, torch.int16
    codes = _meta(n // 16, k // (64 if fmt.index == 5 else 128), 16, 32, dtype=half)
    high = codes
    if fmt.high_bits:
        high = _meta(n // 16, triton.cdiv(k * fmt.high_bits, 512), 16, 32, dtype=half)
    records = _meta(n // 16, k // max(256, planes.group), fields_of(planes), 16, dtype=half)
    return Tiles(planes=planes, codes=codes, high=high, records=records, tickets=_ints(n // 4))


def _linear(table: Tuning) -> Iterator[Case]:
    n, k = 18944, 3584
    weights = {"bf16": _meta(n, k), **{name: meta_planes(name, n, k) for name in PLANE_FORMATS}}
    for name, weight in weights.items():
        # of the newest formats the shapes that differ most
        for rows in (1, 8, 32, 64, 512) if name not in _NEWEST else (1, 32):
            library = table.rule("dense_gemm", m=rows, n=n, k=k).library
            if name == "bf16" and rows > 1 and library and not dense_rule(weight, table, rows, n):
                continue
            x = _meta(rows, k)
            yield f"linear {name} rows {rows}", lambda x=x, w=weight: linear(x, w, table)
        if name in ("bf16", "Q4_K", "Q6_K"):
            x = _meta(1, k)
            yield f"gated {name}", lambda x=x, w=weight: linear(x, w, table, activation=1)
        if name == "bf16" and gates(8, weight, table):
            x, narrow = _meta(8, k), _meta(3584, k)
            yield "gated bf16 rows 8", lambda x=x, w=weight: linear(x, w, table, activation=1)
            yield "linear bf16 split rows 8", lambda x=x, w=narrow: linear(x, w, table)
        if isinstance(weight, Planes):
            yield (
                f"embed {name}",
                lambda w=weight: embedding_rows(_ints(8), w, torch.bfloat16),
            )
    yield from _edges(table)
    yield from _tiles(table)
    if "int8_gemm" in table.rules:
        int8 = Int8(_meta(n, k, dtype=torch.int8), _meta(n, dtype=torch.float32))
        for rows in (1, 64):
            x = _meta(rows, k)
            yield f"linear W8A8 rows {rows}", lambda x=x: linear(x, int8, table)
        norm, x, wide = _meta(k, dtype=torch.float32), _meta(8, k), _meta(8, 2 * n)
        yield (
            "norm W8A8 3584",
            lambda: rms_norm_rounded(x, norm, 1e-6, residual=x, pdl=table.pdl),
        )
        yield "gated W8A8 18944", lambda: gated_rounded(wide, 1, pdl=table.pdl)
    rows = ExpertRows(
        row_ids=_ints(64 * 192), block_expert=_ints(192), block_m=64, pairs=4096, top_k=8
    )
    for name, expert in (
        ("bf16", _meta(128, 1536, 2048)),
        ("Q4_K", meta_planes("Q4_K", 128, 1536, 2048)),
        ("INT4", meta_planes("INT4", 128, 1536, 2048)),
        ("MXFP4", meta_planes("MXFP4", 128, 1536, 2048)),
    ):
        x = _meta(512, 2048)
        yield f"experts {name}", lambda x=x, w=expert: expert_linear(x, w, rows, table)


def _edges(table: Tuning) -> Iterator[Case]:
    """Dense layers of one row of Qwen2.5-7B with their edges, in a type that no ring takes."""
    dtype = torch.float32 if "dense_ring" in table.rules else torch.bfloat16
    h, inner, (hq, hkv, d) = 3584, 18944, _HEADS["28-4x128"]
    shape = HeadShape(num_heads=hq, num_kv_heads=hkv, head_dim=d, scale=d**-0.5)
    rope = Rotation(turns=_meta(d // 2, dtype=torch.float64), dim=d)
    norm = _meta(h, dtype=torch.float32)
    qkv, gate_up, head = (_meta(n, h, dtype=dtype) for n in ((hq + 2 * hkv) * d, 2 * inner, 152064))
    x = Normed(
        stream=_meta(1, h, dtype=dtype),
        weighted=_meta(1, h, dtype=dtype),
        squares=_meta(896, dtype=torch.float32),
        weight=norm,
        eps=1e-6,
    )

    def rule(weight: Tensor, n: int, pairs: int = 0) -> Rule:
        found = dense_rule(weight, table, 1, n, pairs=pairs)
        assert found is not None
        return found

    for k in (h, inner):
        weight, residual = _meta(h, k, dtype=dtype), _meta(1, h, dtype=dtype)
        product = Product(_meta(1, k, dtype=dtype), weight, None, rule(weight, h))
        yield (
            f"stream from {k}",
            lambda p=product, r=residual: to_stream(p, r, norm, 1e-6),
        )
    turn = rule(qkv, len(qkv) // 2, pairs=2)
    product = Product(x, qkv, _meta(len(qkv), dtype=dtype), turn)
    cache, at = _layer_kv("bf16", hkv, d), (_ints(1), _meta(1, dtype=torch.int64))
    yield "heads", lambda: to_heads(product, turn, cache, *at, shape, rope)
    gate, wide = rule(gate_up, inner, pairs=1), rule(head, 152064)
    yield "gated norm", lambda: dense(x, gate_up, gate, activation=1)
    yield "logits norm", lambda: dense(x, head, wide, out_dtype=torch.float32)


def _tiles(table: Tuning) -> Iterator[Case]:
    """What an arch with rules for tiles runs on packed weights."""
    if "tile_gemv" not in table.rules:
        return
    n, k = 18944, 3584
    for name in PLANE_FORMATS:
        weight = meta_tiles(name, n, k)
        for rows in (1, 8, 16) if name in ("Q4_K", "Q6_K", "Q8_0", "INT4") else (1,):
            x = _meta(rows, k)
            yield f"tiles {name} rows {rows}", lambda x=x, w=weight: linear(x, w, table)
        yield f"tiles {name} embed", lambda w=weight: embedding_rows(_ints(8), w, torch.bfloat16)
    weight = meta_tiles("Q4_K", n, k)
    for rows in (1, 8, 16):
        x = _meta(rows, k)
        yield (
            f"tiles Q4_K gated rows {rows}",
            lambda x=x, w=weight: linear(x, w, table, activation=1),
        )


def _small(table: Tuning) -> Iterator[Case]:
    pdl = table.pdl
    x, w = _meta(8, 3584), _meta(3584, dtype=torch.float32)
    yield "rms_norm 3584", lambda: rms_norm(x, w, 1e-6, residual=x, pdl=pdl)
    yield "gated_act 18944", lambda: gated_act(_meta(8, 2 * 18944), 1, pdl=pdl)
    for store in ("bf16", "q8_0", "f8_e5m2"):
        for norm in (None, _meta(128, dtype=torch.float32)):
            yield (
                f"qkv_rope_store {store}{' norms' if norm is not None else ''}",
                lambda store=store, norm=norm: qkv_rope_store(
                    _meta(8, 36 * 128),
                    _layer_kv(store, 4, 128),
                    _ints(8),
                    _meta(8, dtype=torch.int64),
                    HeadShape(num_heads=28, num_kv_heads=4, head_dim=128, scale=1.0),
                    Rotation(turns=_meta(64, dtype=torch.float64), dim=128),
                    q_norm=norm,
                    k_norm=norm,
                    pdl=pdl,
                ),
            )
    fields = {name: _meta(8, dtype=torch.float32) for name in FIELDS} | {"top_k": _ints(8)}
    logits = _meta(8, 152064, dtype=torch.float32)
    yield "sample", lambda: draw(logits, DrawTensors(fields))
    yield "sample greedy", lambda: draw(logits, DrawTensors())
