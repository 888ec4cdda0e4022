"""One request's rights: ends, refusals, log-probabilities, aborts; nothing stays behind."""

import numpy as np
import pytest

from halogen_core.engine.protocol import SamplingParams

from .conftest import request, run


def greedy(engine, prompt, n=12):
    return run(engine, request("probe", prompt, max_tokens=n))[0]["probe"]


def test_length_is_exact(make_engine):
    engine = make_engine()
    for n in (1, 2, 13):
        tokens, last = run(engine, request("r", [1, 2, 3], max_tokens=n))
        assert len(tokens["r"]) == n
        assert last["r"].finish_reason == "length"


def test_end_and_stop_tokens_end(make_engine):
    third = greedy(make_engine(), [1, 2, 3])[2]
    first_at = greedy(make_engine(), [1, 2, 3]).index(third) + 1
    engine = make_engine(end_token_ids=[third])
    tokens, last = run(engine, request("r", [1, 2, 3]))
    assert (len(tokens["r"]), last["r"].finish_reason) == (first_at, "stop")
    assert last["r"].stop_token_id == third
    tokens, last = run(engine, request("r", [1, 2, 3], ignore_eos=True))
    assert (len(tokens["r"]), last["r"].finish_reason) == (12, "length")
    tokens, last = run(make_engine(), request("r", [1, 2, 3], stop_token_ids=[third]))
    assert (len(tokens["r"]), last["r"].finish_reason) == (first_at, "stop")


def test_min_tokens_keeps_end_tokens_away(make_engine):
    first = greedy(make_engine(), [1, 2, 3])[0]
    engine = make_engine(end_token_ids=[first])
    tokens, _ = run(engine, request("r", [1, 2, 3], min_tokens=5))
    assert first not in tokens["r"][:5]
    assert len(tokens["r"]) >= 5


def test_context_bounds_the_answer(make_engine):
    engine = make_engine(max_context=32)
    tokens, last = run(engine, request("r", range(30), max_tokens=100))
    assert (len(tokens["r"]), last["r"].finish_reason) == (2, "length")


@pytest.mark.parametrize(
    ("prompt", "words", "code"),
    [
        (range(40), "the prompt has 40 tokens; this model's context holds 32", "HRT-4004"),
        ([], "no tokens", "HRT-4003"),
        ([97], "outside 0 .. 96", "HRT-4005"),
        ([-1], "outside 0 .. 96", "HRT-4005"),
    ],
)
def test_bad_prompts_are_refused_and_others_unhurt(make_engine, prompt, words, code):
    engine = make_engine(max_context=32)
    tokens, last = run(engine, request("good", [1, 2]), request("bad", prompt))
    assert last["bad"].error_code == code
    assert words in last["bad"].error
    assert len(tokens["good"]) == 12


def test_logit_bias_forces_and_forbids(make_engine):
    engine = make_engine()
    forced = SamplingParams(logit_bias={42: 1e4})
    assert set(run(engine, request("r", [1], sampling=forced))[0]["r"]) == {42}
    favourite = greedy(engine, [1])[0]
    banned = SamplingParams(logit_bias={favourite: -1e4})
    assert favourite not in run(engine, request("r", [1], sampling=banned))[0]["r"]


def test_logprobs_are_of_the_chosen_and_sorted(make_engine):
    engine = make_engine()
    logprobs = []
    engine.submit(request("r", [1, 2, 3], num_logprobs=5))
    while engine.has_work:
        for output in engine.step():
            logprobs += output.logprobs
    assert len(logprobs) == 12
    for entry in logprobs:
        assert entry.token_id == entry.top_ids[0]
        assert entry.logprob == pytest.approx(entry.top_logprobs[0])
        assert entry.top_logprobs == sorted(entry.top_logprobs, reverse=True)
        assert sum(np.exp(entry.top_logprobs)) <= 1.0 + 1e-5


@pytest.mark.parametrize("budget", [8, 64])
def test_prompt_logprobs_cover_the_prompt(make_engine, budget):
    engine = make_engine(max_batch_tokens=budget)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
    run(engine, request("warm", prompt))
    engine.submit(request("r", prompt, num_logprobs=0, prompt_logprobs=True, max_tokens=1))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    (output,) = outputs
    assert output.cached_tokens == 0
    assert output.prompt_logprobs[0] is None
    assert [p.token_id for p in output.prompt_logprobs[1:]] == prompt[1:]
    # teacher forcing one token at a time says the same
    for i in (1, 7, 14):
        engine.submit(request("t", prompt[:i], num_logprobs=97, max_tokens=1))
        table = []
        while engine.has_work:
            table += engine.step()
        (entry,) = table[0].logprobs
        expected = dict(zip(entry.top_ids, entry.top_logprobs, strict=True))[prompt[i]]
        assert output.prompt_logprobs[i].logprob == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("at", range(0, 12, 2))
def test_an_abort_frees_everything_and_hurts_nobody(make_engine, at):
    engine = make_engine(max_batch_tokens=8)
    victims = [request("a", range(30)), request("b", range(20, 60))]
    tokens, last = run(engine, *victims, request("c", [1, 2]), abort_at={"a": at, "b": at + 1})
    assert len(tokens["c"]) == 12
    assert not {"a", "b"} & {n for n, o in last.items() if o.finish_reason == "error"}
    stats = engine.stats()
    assert (stats.blocks_active, stats.running, stats.waiting) == (0, 0, 0)


def test_broken_output_fails_only_its_request(make_engine):
    engine = make_engine()
    wait = engine.runner.wait

    def poison(launched):
        result = wait(launched)
        result.token_ids[0] = -1
        return result

    engine.submit(request("bad", [1, 2]))
    engine.submit(request("good", [3, 4]))
    engine.runner.wait = poison
    first = engine.step()
    engine.runner.wait = wait
    rest = []
    while engine.has_work:
        rest += engine.step()
    assert [o.error_code for o in first if o.request_id == "bad"] == ["HRT-3004"]
    assert [o.finish_reason for o in rest if o.finish_reason] == ["length"]
    assert {o.request_id for o in rest} == {"good"}
