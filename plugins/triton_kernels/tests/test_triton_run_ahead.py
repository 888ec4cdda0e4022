"""An engine that launches steps before the last one's tokens are known says what others say."""

import sys
from pathlib import Path

import pytest

from halogen_core.engine.building import assemble_engine
from halogen_core.engine.options import EngineOptions
from halogen_core.engine.protocol import GenerateRequest, SamplingParams
from halogen_core.models import config_of
from halogen_core.spi import RunsAhead

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_backend import triton_backend
from tiny_models import tiny


def answers(run_ahead, ends):
    checkpoint = tiny(layers=1)
    options = EngineOptions(
        model_path="", model_id="", end_token_ids=ends, max_batch=4, run_ahead=run_ahead
    )
    engine = assemble_engine(options, triton_backend(), checkpoint, config_of(checkpoint))
    sampled = SamplingParams(temperature=0.9, top_p=0.9, seed=4)
    for i, sampling in enumerate((SamplingParams(), sampled, SamplingParams())):
        refused = engine.submit(
            GenerateRequest(
                request_id=str(i),
                prompt_token_ids=[7 * i + 3, 5, 9 + i],
                max_tokens=4 + i,
                sampling=sampling,
            )
        )
        assert not refused
    said, why = {}, {}
    while engine.has_work:
        for output in engine.step():
            said.setdefault(output.request_id, []).extend(output.token_ids)
            why[output.request_id] = output.finish_reason
    assert isinstance(engine.runner.backend, RunsAhead)
    return said, why


@pytest.mark.slow
def test_ahead_equals_step_by_step():
    said, why = answers(False, [])
    assert answers(True, []) == (said, why)
    ends = [said["2"][2]]  # an end that nobody could foresee
    stopped = answers(False, ends)
    assert stopped[1]["2"] == "stop"
    assert answers(True, ends) == stopped
