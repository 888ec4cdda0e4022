"""Hand-worked values for every op, so that the oracle itself has something to answer to.

Each entry was worked out on paper from the definition in `halogen_core.spi.ops`; the comment says
how. `check()` compares the oracle with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from halogen_conformance.oracle import operations as op
from halogen_conformance.oracle import sampling
from halogen_conformance.oracle.sampling import Policy
from halogen_core.spi import Activation, AttentionSpec, MoESpec, RopeSpec, RopeStyle


def embed() -> tuple[object, object]:
    # row 2, then row 0, each doubled
    return op.embed(np.array([2, 0]), np.array([[1, 2], [3, 4], [5, 6]]), 2.0), [[10, 12], [2, 4]]


def rms_norm() -> tuple[object, object]:
    # mean of 9 and 16 is 12.5; plus eps 3.5 is 16; root 4; times weights 1 and 2
    return op.rms_norm(np.array([[3.0, 4.0]]), np.array([1.0, 2.0]), 3.5), [[0.75, 2.0]]


def linear() -> tuple[object, object]:
    # [1 2] on rows [3 4] and [5 6]: 11 and 17, plus 1 and -1
    weight = np.array([[3.0, 4], [5, 6]])
    return op.linear(np.array([[1.0, 2]]), weight, np.array([1.0, -1])), [[12, 16]]


def rope_neox() -> tuple[object, object]:
    # a quarter turn takes (x0, x2) to (-x2, x0); the second pair has frequency 0 and stays
    spec = RopeSpec(dim=4, inv_freq=(math.pi / 2, 0.0), style=RopeStyle.NEOX)
    return op.rope(np.array([[[1.0, 2, 3, 4]]]), np.array([1]), spec), [[[-3, 2, 1, 4]]]


def rope_interleaved() -> tuple[object, object]:
    # the same turn on neighbours (x0, x1); twice the factor; beyond dim 4 untouched
    spec = RopeSpec(
        dim=4,
        inv_freq=(math.pi / 2, 0.0),
        style=RopeStyle.INTERLEAVED,
        attention_factor=2.0,
    )
    x = np.array([[[1.0, 2, 3, 4, 9]]])
    return op.rope(x, np.array([1]), spec), [[[-4, 2, 6, 8, 9]]]


def _spec(**more: object) -> AttentionSpec:
    fields: dict[str, object] = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 1, "scale": 1.0}
    return AttentionSpec(**{**fields, **more})  # type: ignore[arg-type]


def attention_causal() -> tuple[object, object]:
    # logits of equal size: the first query sees value 1 only, the second the mean of 1 and 3
    q, k, v = np.zeros((2, 1, 1)), np.ones((2, 1, 1)), np.array([[[1.0]], [[3.0]]])
    return op.attention_one(q, k, v, _spec()), [[[1]], [[2]]]


def attention_weights() -> tuple[object, object]:
    # logits 0 and ln 3 by scale 1/2: weights 1/4 and 3/4 on values 0 and 8
    q = np.array([[[2 * math.log(3)]]])
    k, v = np.array([[[0.0]], [[1.0]]]), np.array([[[0.0]], [[8.0]]])
    return op.attention_one(q, k, v, _spec(scale=0.5)), [[[6]]]


def attention_window() -> tuple[object, object]:
    # window 2 hides the first of three equal keys: mean of 3 and 5
    q, k = np.zeros((1, 1, 1)), np.ones((3, 1, 1))
    v = np.array([[[100.0]], [[3.0]], [[5.0]]])
    return op.attention_one(q, k, v, _spec(window=2)), [[[4]]]


def attention_sink() -> tuple[object, object]:
    # one key and a sink of the same logit 0: half of the value
    q, k, v = np.zeros((1, 1, 1)), np.ones((1, 1, 1)), np.array([[[6.0]]])
    return op.attention_one(q, k, v, _spec(), np.array([0.0])), [[[3]]]


def attention_softcap() -> tuple[object, object]:
    # logits -1000 and 1000 are capped to -c and c with c = ln(3)/2: weights 1/4 and 3/4
    q, k = np.array([[[1000.0]]]), np.array([[[-1.0]], [[1.0]]])
    v = np.array([[[0.0]], [[8.0]]])
    return op.attention_one(q, k, v, _spec(softcap=math.log(3) / 2)), [[[6]]]


def attention_heads() -> tuple[object, object]:
    # four query heads on two KV heads with one key: heads 0, 1 read value 5; 2, 3 value 7
    q, k = np.zeros((1, 4, 1)), np.zeros((1, 2, 1))
    v = np.array([[[5.0], [7.0]]])
    spec = _spec(num_heads=4, num_kv_heads=2)
    return op.attention_one(q, k, v, spec), [[[5], [5], [7], [7]]]


def silu() -> tuple[object, object]:
    # silu(0) is 0; silu(ln 3) is 3/4 ln 3, times up 4
    x = np.array([[0.0, math.log(3), 9.0, 4.0]])
    return op.gated_act(x, Activation.SILU), [[0, 3 * math.log(3)]]


def gelu() -> tuple[object, object]:
    # 1/2 (1 + tanh(sqrt(2/pi) 1.044715)) with up 2
    inner = math.tanh(math.sqrt(2 / math.pi) * 1.044715)
    return op.gated_act(np.array([[1.0, 2.0]]), Activation.GELU_TANH), [[1 + inner]]


def swiglu_oai() -> tuple[object, object]:
    # gate 100 is clamped to 7, up -100 to -7: 7 sigmoid(11.914) (-6)
    value = -42 / (1 + math.exp(-1.702 * 7))
    return op.gated_act(np.array([[100.0, -100.0]]), Activation.SWIGLU_OAI), [[value]]


def moe() -> tuple[object, object]:
    # logits 0, ln 3 and -50: top two with weights 1/4 and 3/4; experts give x silu(1)-free
    # products: gate and up rows are [1] and [c], down [1], so expert e gives silu(1) c
    spec = MoESpec(num_experts=3, top_k=2)
    router = np.array([[0.0], [math.log(3)], [-50.0]])
    gate_up = np.array([[[1.0], [4.0]], [[1.0], [8.0]], [[1.0], [1e9]]])
    down = np.ones((3, 1, 1))
    silu1 = 1 / (1 + math.exp(-1))
    return op.moe(np.array([[1.0]]), router, gate_up, down, spec), [[7 * silu1]]


def logits() -> tuple[object, object]:
    # 3 * 2 halved is 3; capped at 3: 3 tanh(1)
    got = op.logits(np.array([[3.0]]), np.array([[2.0]]), 0.5, 3.0)
    return got, [[3 * math.tanh(1)]]


def penalties() -> tuple[object, object]:
    # 4 / 2 - 0.5 * 2 - 0.25; -4 * 2 (in the prompt only); untouched 1 plus bias 2
    policy = Policy(
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        history=((0, 2), (1, 0)),
        bias=((2, 2.0),),
    )
    return sampling.adjusted(np.array([4.0, -4.0, 1.0]), policy), [0.75, -8, 3]


def nucleus() -> tuple[object, object]:
    # probabilities 1/2, 1/4, 1/8, 1/8: top-k 3 leaves 4/7, 2/7, 1/7; top-p 0.6 keeps two
    policy = Policy(temperature=1.0, top_k=3, top_p=0.6)
    p = sampling.distribution(np.log([0.5, 0.25, 0.125, 0.1249999]), policy)
    return p, [2 / 3, 1 / 3, 0, 0]


def draw() -> tuple[object, object]:
    # cumulative 0.25, 0.75, 1: 0.2 falls on token 0, 0.25 on 1, 0.74 on 1, 0.8 on 2
    row = np.log([0.25, 0.5, 0.25])
    uniforms = (0.2, 0.2501, 0.74, 0.8)
    picked = [sampling.pick(row, Policy(temperature=1.0, uniform=u)) for u in uniforms]
    return picked, [0, 1, 1, 2]


GOLDENS: tuple[Callable[[], tuple[object, object]], ...] = (
    embed,
    rms_norm,
    linear,
    rope_neox,
    rope_interleaved,
    attention_causal,
    attention_weights,
    attention_window,
    attention_sink,
    attention_softcap,
    attention_heads,
    silu,
    gelu,
    swiglu_oai,
    moe,
    logits,
    penalties,
    nucleus,
    draw,
)
