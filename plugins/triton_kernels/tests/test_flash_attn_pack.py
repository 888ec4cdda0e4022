"""The flash-attn pack against the package's documented contract, with a stand-in for the package.

flash-attn itself needs a GPU and never ran here: the stand-in checks arguments as the package's
documentation demands and computes in float64 what it promises.
"""

import importlib.machinery
import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from halogen_core.engine.batch import build_step
from halogen_core.plugins import PluginRegistry, install_packs
from halogen_core.spi import (
    AttentionSpec,
    BackendOptions,
    ConfigError,
    KernelPack,
    OpSignature,
    SupportLevel,
)
from halogen_triton import flash_attn_pack
from halogen_triton.backend import TritonBackend

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_backend import DEVICE, SMALL, item, open_runner
from tiny_models import tiny

CALLS = []


def flash_attn_varlen_func(  # noqa: PLR0917 - the signature is the package's
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    """As documented: bottom-right aligned causal mask, inclusive window, pages of 256 n tokens."""
    CALLS.append((len(cu_seqlens_q) - 1, window_size, softcap))
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    for lengths in (cu_seqlens_q, cu_seqlens_k, block_table):
        assert lengths.dtype == torch.int32
        assert lengths.stride(-1) == 1
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.shape[1] % 256 == 0
    assert causal
    assert dropout_p == 0.0
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[2]
    for s in range(len(cu_seqlens_q) - 1):
        begin, end = cu_seqlens_q[s : s + 2].tolist()
        length = int(cu_seqlens_k[s + 1] - cu_seqlens_k[s])
        assert end - begin <= max_seqlen_q
        assert length <= max_seqlen_k
        pages = block_table[s, : -(-length // k.shape[1])].long()
        keys, values = (x[pages].flatten(0, 1)[:length].double() for x in (k, v))
        for row in range(begin, end):
            at = row - begin + length - (end - begin)
            low = 0 if window_size[0] < 0 else max(0, at - window_size[0])
            for head in range(q.shape[1]):
                seen = slice(low, at + 1)
                scores = keys[seen, head // group] @ q[row, head].double() * softmax_scale
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                out[row, head] = (scores.softmax(0) @ values[seen, head // group]).to(q.dtype)
    return out


@pytest.fixture
def flash_attn(monkeypatch):
    module = types.ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    CALLS.clear()


def backend(**extra):
    options = BackendOptions(extra={"dtype": "bf16", **extra})
    return TritonBackend(options, tuning=SMALL, device=DEVICE, name="cuda")


def with_pack(**extra):
    found = backend(**extra)
    call = flash_attn_pack.make(found)
    found.install(
        KernelPack(op="attention", name="flash_attn", call=call, supports=flash_attn_pack.supports)
    )
    return found


def steps():
    a, b = (np.random.default_rng(i).integers(0, 128, 24).tolist() for i in (1, 2))
    yield [item(a, 0, 17, [3])]
    yield [item(a, 17, 1, [3]), item(b, 0, 5, [1])]
    yield [item(a, 18, 1, [3]), item(b, 5, 1, [1])]


def logits(opened, size=256):
    opened_runner = open_runner(opened, tiny(layers=1, head_dim=16), "bf16", block_size=size)
    return [opened_runner.logits(build_step(items, size).batch) for items in steps()]


def test_it_serves_prompts_decoding_and_mixed_steps(flash_attn):
    own, theirs = logits(backend()), logits(with_pack())
    assert [sequences for sequences, *_ in CALLS] == [1, 2, 2]
    for one, other in zip(own, theirs, strict=True):
        assert np.abs(one - other).max() <= 0.03 * np.abs(one).max()


def test_other_pages_stay_with_our_kernels(flash_attn):
    logits(with_pack(), size=64)
    assert CALLS == []


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_windows_and_softcap_mean_the_same(flash_attn, window, softcap):
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, window=window, softcap=softcap
    )
    results = []
    for opened in (backend(), with_pack()):
        runner = open_runner(opened, tiny(layers=1, head_dim=16), "bf16", block_size=256)
        rng = torch.Generator().manual_seed(0)
        runner.kv.payload.data.copy_(torch.randn(runner.kv.payload.data.shape, generator=rng))
        batch = build_step([item(list(range(20)), 13, 7, [2])], 256).batch
        q = torch.randn(7, 64, generator=rng).bfloat16().to(opened.device)
        meta = opened.upload_step(batch)
        results.append(opened.ops.attention(q, runner.kv, 0, meta, spec).float())
    assert len(CALLS) == 1
    assert (results[0] - results[1]).abs().max() <= 0.03 * results[0].abs().max()


def question(**changes):
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=changes.pop("head_dim", 128), scale=1
    )
    given = {"dtype": "bf16", "kv_dtype": "bf16", "block_size": 256, **changes}
    return OpSignature(op="attention", attention=spec, **given)


def test_conditions():
    assert flash_attn_pack.supports(question()).level is SupportLevel.NATIVE
    for changes in (
        {"dtype": "f32", "kv_dtype": "f32"}, {"kv_dtype": "q8_0"}, {"block_size": 64},
        {"head_dim": 36}, {"head_dim": 512},
    ):  # fmt: skip
        denied = flash_attn_pack.supports(question(**changes))
        assert denied.level is SupportLevel.NO
        assert denied.reasons
    assert math.isfinite(flash_attn_pack.PAGE)


def test_the_placement_report_names_it(flash_attn):
    place = {p.op: p for p in with_pack().placement()}["attention"]
    assert place.implementation == "flash_attn"
    assert "TritonOps" in place.reasons[0]
    triton = with_pack(attention="triton")
    assert "TritonOps" in {p.op: p for p in triton.placement()}["attention"].implementation


def test_plugins_offer_it_only_where_it_is_installed(flash_attn, monkeypatch):
    opened = backend()
    install_packs(PluginRegistry.discover(), "cuda", opened)
    place = {p.op: p for p in opened.placement()}["attention"]
    assert place.implementation == "halogen_triton.flash_attn_pack"
    monkeypatch.delitem(sys.modules, "flash_attn")
    assert flash_attn_pack.offers("cuda") == []


def test_asking_for_it_in_vain_is_an_error():
    with pytest.raises(ConfigError, match="not installed") as caught:
        backend(attention="flash-attn")
    assert caught.value.code == "HRT-3413"
    with pytest.raises(ConfigError, match="allowed are auto"):
        backend(attention="fast")


def test_asking_for_it_prefers_its_pages(flash_attn):
    assert backend(attention="flash-attn").capabilities().kv_block_sizes[0] == 256
    assert backend().capabilities().kv_block_sizes[0] == 64
