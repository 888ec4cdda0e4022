"""`halogen bench`: bounds and verdicts by hand, the fit on known curves, comparison with a baseline."""

import json
import math

import numpy as np
import pytest

from halogen_core.cli.bench import check, drifts, plan_works, read_baseline
from halogen_core.cli.bench_runs import Measured, Run, Work
from halogen_core.cli.bounds import Load, decode_bound, prefill_bound, verdict
from halogen_core.cli.flash_fit import contexts_up_to, fit
from halogen_core.config import resolve
from halogen_core.errors import ConfigError


def test_bounds_by_hand():
    load = Load(weight_bytes=10 * 10**9, elements=20 * 10**9, kv_bytes=10**9, sequences=4)
    # 14 GB a step at 140 GB/s: ten steps of four tokens
    assert decode_bound(load, 140e9, None) == pytest.approx(40)
    assert decode_bound(load, 140e9, 40e9 * 25) == pytest.approx(25), "compute binds"
    assert prefill_bound(load, 4e12) == pytest.approx(100)
    # of a prompt only the last token meets the output head
    headed = Load(weight_bytes=1, elements=20 * 10**9, head=12 * 10**9)
    assert prefill_bound(headed, 4e12) == pytest.approx(250)


def test_a_batch_meets_more_experts():
    one = Load(weight_bytes=8, elements=1, sequences=1, experts=(8, 128))
    assert one.step_bytes == pytest.approx(8)
    many = Load(weight_bytes=8, elements=1, sequences=10_000, experts=(8, 128))
    assert many.step_bytes == pytest.approx(128), "all of them, once"


@pytest.mark.parametrize(
    ("rate", "word"), [(9, "within the bound"), (11, "speculative"), (13, "impossible")]
)
def test_verdicts(rate, word):
    assert verdict(rate, 10, 12) == word


def test_no_bound_no_verdict():
    assert verdict(1e9, None, None) == "no bound known"
    assert verdict(11, 10, None) == "speculative"


# the claim of 51 tok/s for 20 GB of weights, on a bus of 256 GB/s
def test_a_famous_claim_is_impossible():
    load = Load(weight_bytes=19_850_000_000, elements=32_000_000_000)
    best, peak = (decode_bound(load, b, None) for b in (235e9, 256e9))
    assert verdict(51, best, peak) == "impossible"
    assert verdict(12.5, best, peak) == "speculative"


@pytest.mark.parametrize("crossing", [100, 700, 1500, 20000])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_the_fit_finds_the_crossing_within_a_bucket(crossing, noise):
    contexts = contexts_up_to(32768)
    rng = np.random.default_rng(crossing)
    scatter = lambda: 1 + noise * rng.standard_normal()  # noqa: E731
    # direct costs per token, flash has a fixed cost and a quarter of the slope
    direct = [(10 + 0.02 * c) * scatter() for c in contexts]
    flash = [(10 + 0.75 * 0.02 * crossing + 0.005 * c) * scatter() for c in contexts]
    found = fit(contexts, direct, flash)
    bucket = 2**0.5 if noise == 0 else 2.0
    assert abs(math.log(found / crossing)) <= math.log(bucket) + 1e-9


def test_a_path_that_never_pays():
    contexts = contexts_up_to(1000)
    assert fit(contexts, [1.0] * len(contexts), [2.0] * len(contexts)) == 1000
    assert fit(contexts, [2.0] * len(contexts), [1.0] * len(contexts)) == 0


def test_impossible_work_is_refused():
    assert [w.name for w in plan_works("decode", "1,2", 8, 4)] == [
        "decode, 1 × (8 in, 4 out)",
        "decode, 2 × (8 in, 4 out)",
    ]
    for kinds, sizes in (("decode,x", "1"), ("decode", "0"), ("decode", "a"), ("mixed", "1")):
        with pytest.raises(ConfigError, match="allowed"):
            plan_works(kinds, sizes, 8, 4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch": 9}, "up to --max-batch, which is 8"),
        ({"save": True}, "only with --fit-flash-threshold"),
        ({"out": "folder"}, "a file that can be written"),
        ({"out": "file/x.json"}, "a file that can be written"),
    ],
)
def test_what_would_be_wrong_or_lost_is_refused_before_measuring(tmp_path, given, said):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    config = resolve({"max_batch": 8}, environment={})
    works = plan_works("decode", str(given.get("batch", 8)), 8, 4)
    out = tmp_path / given["out"] if "out" in given else None
    with pytest.raises(ConfigError, match=said):
        check(works, config, save=given.get("save", False), fits=False, out=out)


def test_a_result_can_be_written_where_nothing_is_yet(tmp_path):
    out, config = tmp_path / "new/x.json", resolve({}, environment={})
    check(plan_works("decode", "1", 8, 4), config, save=True, fits=True, out=out)
    assert out.read_text() == ""


def result(rate):
    work = {"kind": "decode", "batch": 1, "prompt": 8, "tokens": 4, "tok_s": rate}
    return {"device": "d", "model": "m", "results": [work]}


@pytest.mark.parametrize(("rate", "lines"), [(102, 0), (104, 1), (96, 1)])
def test_a_baseline_is_kept_within_three_percent(tmp_path, rate, lines):
    path = tmp_path / "before.json"
    path.write_text(json.dumps(result(100)))
    assert len(drifts(result(rate), read_baseline(path, result(0)))) == lines


def test_a_baseline_of_another_device_is_refused(tmp_path):
    path = tmp_path / "before.json"
    path.write_text(json.dumps(result(100) | {"device": "other"}))
    with pytest.raises(ConfigError, match="other"):
        read_baseline(path, result(100))
    path.write_text("{")
    for unread in (path, tmp_path / "none.json"):
        with pytest.raises(ConfigError, match="--baseline"):
            read_baseline(unread, result(100))


def test_throughput_and_time_per_token_must_agree():
    work = Work(kind="decode", batch=2, prompt=1, tokens=3)
    honest = Run(rate=200.0, ttft=(0.1, 0.1), gaps=(0.01,) * 4)
    found = Measured(work=work, runs=(honest,)).report()
    assert found["consistent"]
    assert found["itl_ms"]["p99"] == pytest.approx(10)
    boast = Run(rate=2800.0, ttft=(0.1, 0.1), gaps=(0.035,) * 4)
    assert not Measured(work=work, runs=(boast,)).report()["consistent"]
