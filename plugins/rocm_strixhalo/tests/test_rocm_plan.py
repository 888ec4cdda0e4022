"""`halogen plan` from the shipped profile, and the backend opened on a fixture tree."""

import logging
import os
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import attrs
import numpy as np
import pytest

from halogen_core.cli.bounds import active_weights, kv_bytes_per_token
from halogen_core.cli.plan import Workload, fallbacks, lines, plan
from halogen_core.cli.profiles import find_profile
from halogen_core.errors import BackendUnavailable, ConfigError, OutOfMemory, UnsupportedOp
from halogen_core.spi import (
    FORMATS,
    AttentionSpec,
    BackendOptions,
    DecoderConfig,
    KVSpec,
    LayerConfig,
    MoESpec,
    QuantTensor,
    WeightRole,
)
from halogen_rocm.backend import RocmBackend, create, create_ahead
from halogen_triton.backend import GRAPH_BYTES

sys.path.insert(0, str(Path(__file__).parent))
from trees import tree

GIB = 1 << 30


class Header:
    """A checkpoint of sizes only: Qwen2.5-32B in Q4_K."""

    path, architecture, hparams = "qwen2.5-32b-q4_k", "qwen2", {}
    layers, hidden, inner, vocab, heads, kv_heads, dim = 64, 5120, 27648, 152064, 40, 8, 128

    def shapes(self):
        out = {
            "token_embd.weight": (self.vocab, self.hidden),
            "output.weight": (self.vocab, self.hidden),
        }
        for i in range(self.layers):
            sizes = {
                "attn_q": (self.heads * self.dim, self.hidden), "attn_k": (self.kv_heads * self.dim, self.hidden),
                "attn_v": (self.kv_heads * self.dim, self.hidden), "attn_output": (self.hidden, self.heads * self.dim),
                "ffn_gate": (self.inner, self.hidden), "ffn_up": (self.inner, self.hidden),
                "ffn_down": (self.hidden, self.inner),
            }  # fmt: skip
            out |= {f"blk.{i}.{k}.weight": v for k, v in sizes.items()}
        return out

    def names(self):
        return self.shapes().keys()

    def tensor(self, name):
        n, k = self.shapes()[name]
        size = FORMATS["Q4_K"].nbytes(n * k)
        data = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (size,), (0,))
        return QuantTensor(format="Q4_K", shape=(n, k), data=data, name=name)


def decoder(header, **more):
    attention = AttentionSpec(
        num_heads=header.heads, num_kv_heads=header.kv_heads, head_dim=header.dim, scale=1.0
    )
    return DecoderConfig(
        architecture="qwen2",
        layers=(LayerConfig(attention=attention, **more),) * header.layers,
        hidden_size=header.hidden,
        intermediate_size=header.inner,
        vocab_size=header.vocab,
        context_length=32768,
        norm_eps=1e-6,
    )


PROFILE = find_profile("strix-halo-128")
WORK = Workload(context=32768, kv_dtype="f16", block_size=64, max_batch_tokens=2048)


def test_a_32b_model_by_hand():
    header = Header()
    about = plan(header, decoder(header), PROFILE, WORK)
    assert kv_bytes_per_token(decoder(header), "f16") == 256 * 1024
    # 4.5 bits in the file; scales and minima of 6 bits are kept in bytes
    elements = 64 * (5120 * (40 + 8 + 8 + 40) * 128 + 3 * 5120 * 27648) + 2 * 152064 * 5120
    weights = about["pools"]["static"]
    assert weights == elements * 4.625 / 8
    # float32 rows of queries, keys, values, gate and up, and of 64 sequences' logits
    temp = 4 * (2048 * (4 * 5120 + 2 * 56 * 128 + 3 * 27648) + 3 * 64 * 152064)
    assert about["pools"]["temp"] == temp
    left = PROFILE.free - PROFILE.reserve - weights - temp - GRAPH_BYTES
    block = 256 * 1024 * 64
    assert about["kv_tokens"] == (left // block - 1) * 64
    assert about["sessions"] == about["kv_tokens"] // 32768 == 11
    read = weights - 152064 * 5120 * 4.625 / 8
    decode = about["bounds"]["decode_tok_s_empty"]
    assert decode["peak"] == pytest.approx(256e9 / read)
    assert decode["safe"] < decode["peak"] < 15, "no claim over the bus"
    full = about["bounds"]["decode_tok_s_full"]["safe"]
    assert full == pytest.approx(215e9 / (read + 256 * 1024 * 32768))
    # eleven users of 32k in sum: less than twice one of them, for KV is read for each
    assert about["together"] == 11
    step = read + 11 * 256 * 1024 * 32768
    total = about["bounds"]["decode_tok_s_together"]
    assert total["peak"] == pytest.approx(11 * 256e9 / step)
    assert any("together of 11 sessions of 32768" in line for line in lines(about))
    # a prompt's tokens meet neither the table nor, but for the last, the head
    prefill = about["bounds"]["prefill_tok_s"]["tuned"]
    assert prefill == pytest.approx(37e12 / (2 * (elements - 2 * 152064 * 5120)))
    assert any("not a speed" in line for line in lines(about))


def test_experts_count_only_when_they_are_chosen():
    header = Header()
    moe = MoESpec(num_experts=128, top_k=8)
    dense = active_weights(header, decoder(header))
    assert active_weights(header, decoder(header, moe=moe)) == dense


def test_what_cannot_fit_is_refused_with_arithmetic():
    header = Header()
    small = attrs.evolve(PROFILE, free=24 * GIB)
    with pytest.raises(OutOfMemory, match=r"24.00 GiB - reserve 6.00 GiB - weights") as caught:
        plan(header, decoder(header), small, WORK)
    assert caught.value.code == "HRT-3420"


def test_the_longest_context_that_fits_is_named():
    header = Header()
    small = attrs.evolve(PROFILE, free=32 * GIB)
    with pytest.raises(OutOfMemory, match="one session of 32768") as caught:
        plan(header, decoder(header), small, WORK)
    tokens = int(caught.value.fix.split("at most ")[1].split(",")[0])
    assert 0 < tokens < 32768
    fits = plan(header, decoder(header), small, attrs.evolve(WORK, context=tokens))
    assert fits["sessions"] == 1


def test_fallbacks_are_named():
    found = fallbacks(PROFILE, Counter({"Q4_K": 3, "IQ9": 1}))
    assert any("IQ9" in text for text in found)
    assert not any("Q4_K" in text for text in found)


def test_what_serve_would_refuse_is_refused():
    header = Header()
    with pytest.raises(ConfigError, match="the model allows 32768"):
        plan(header, decoder(header), PROFILE, attrs.evolve(WORK, context=40000))
    narrow = attrs.evolve(PROFILE, head_dim_max=64)
    with pytest.raises(UnsupportedOp, match="head dim is 128"):
        plan(header, decoder(header), narrow, WORK)
    header.dim = 80
    with pytest.raises(ConfigError, match="multiple of 32, the model has 80"):
        plan(header, decoder(header), PROFILE, attrs.evolve(WORK, kv_dtype="q8_0"))
    header.dim = 128
    with pytest.raises(ConfigError, match="one KV block takes"):
        plan(header, decoder(header), PROFILE, attrs.evolve(WORK, host_bytes=4096))


def test_tensors_that_nobody_loads_take_nothing():
    """Heads that draft lie in the file behind the model's own layers."""

    class Drafting(Header):
        def shapes(self):
            return super().shapes() | {"blk.64.ffn_up.weight": (27648, 5120)}

    plain, more = (plan(h, decoder(h), PROFILE, WORK) for h in (Header(), Drafting()))
    assert plain["pools"] == more["pools"]
    assert plain["bounds"] == more["bounds"]


def test_unknown_profiles_and_dtypes_are_refused():
    with pytest.raises(ConfigError, match=r"no installed plugin .*strix-halo-128"):
        find_profile("strix-halo-999")
    with pytest.raises(ConfigError, match=r"of backend `rocm` there are strix-halo-128, strix"):
        find_profile(None, "rocm")
    with pytest.raises(ConfigError, match=r"`cpu_ggml` has no profile .*none"):
        find_profile("strix-halo-128", "cpu_ggml")
    header = Header()
    with pytest.raises(ConfigError, match="kv dtype"):
        plan(header, decoder(header), PROFILE, attrs.evolve(WORK, kv_dtype="q2"))


def test_the_profile_implies_its_backend(tmp_path):
    """By name and as a file; a backend's alias is as good as its name."""
    assert find_profile("strix-halo-64", "rocm").backend == PROFILE.backend == "rocm_strixhalo"
    shipped = Path(__file__).parents[1] / "halogen_rocm/profiles/strix-halo-64.json"
    assert find_profile(str(shipped)) == find_profile(str(shipped), "rocm")
    with pytest.raises(ConfigError, match="is of backend `rocm_strixhalo`, not `cpu_ggml`"):
        find_profile(str(shipped), "cpu_ggml")


def test_a_host_tier_adds_nothing_to_one_memory():
    header = Header()
    work = attrs.evolve(WORK, host_bytes=8 * GIB)
    same, more = (plan(header, decoder(header), PROFILE, w) for w in (WORK, work))
    assert more["kv_tokens"] == same["kv_tokens"]
    assert "one memory, so it is part of the KV above" in more["arithmetic"][-1]
    apart = attrs.evolve(PROFILE, shared_with_host=False)
    about = plan(header, decoder(header), apart, work)
    assert about["arithmetic"][-1] == "host tier 8.00 GiB: 32768 more tokens of prefixes, by copies"
    with pytest.raises(OutOfMemory, match="the same memory as the KV pool") as caught:
        plan(header, decoder(header), PROFILE, attrs.evolve(work, host_bytes=90 * GIB))
    assert caught.value.code == "HRT-3305"
    most = int(caught.value.fix.split("at most ")[1].split("MiB")[0])
    plan(header, decoder(header), PROFILE, attrs.evolve(work, host_bytes=most << 20))


def test_the_backend_tells_its_memory_and_counts_what_it_holds(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    options = BackendOptions(extra={"reserve_gib": "10"})
    backend = RocmBackend(options, root=tree(tmp_path, "A"), device="cpu")
    assert "Using device: rocm:0 (gfx1151, card1)" in caplog.text
    assert backend.capabilities().unified_memory
    before = backend.memory()[0]
    layout = backend.kv_layout(KVSpec(num_layers=2, num_kv_heads=2, head_dim=64, block_size=16))
    backend.kv_alloc(layout, 7)
    norm = QuantTensor(format="F32", shape=(8,), data=np.zeros(32, np.uint8))
    backend.pack([norm], WeightRole.NORM)
    held = layout.bytes_per_block * 8 + 32
    assert before.free - backend.memory()[0].free == held
    assert backend.counters().gauges["device_ledger_bytes"] == held


@pytest.mark.parametrize(
    ("key", "value"), [("reserve_gib", "much"), ("reserve_gib", "-1"), ("graphs", "yes"),
                       ("pdl", "1"), ("mlock", "true"), ("nosuch", "1")]
)  # fmt: skip
def test_options_that_cannot_be_are_refused(tmp_path, key, value):
    """None of them is read as a silent `off`."""
    with pytest.raises(ConfigError, match=key):
        RocmBackend(BackendOptions(extra={key: value}), root=tree(tmp_path, "A"), device="cpu")


def test_compiling_ahead_refuses_what_the_device_would(monkeypatch):
    monkeypatch.setattr("halogen_triton.interpreter.active", lambda: False)
    with pytest.raises(ConfigError, match="rocm:0"):
        create_ahead(BackendOptions(device="rocm:3"))
    with pytest.raises(ConfigError, match="nosuch"):
        create_ahead(BackendOptions(extra={"nosuch": "1"}))


def test_no_strix_halo_no_backend(tmp_path):
    with pytest.raises(BackendUnavailable, match="gfx1151"):
        RocmBackend(BackendOptions(), root=tree(tmp_path, "J"), device="cpu")
    with pytest.raises(ConfigError, match="rocm:0"):
        create(BackendOptions(device="rocm:3"))
