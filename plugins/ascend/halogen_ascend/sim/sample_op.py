"""The op that picks tokens."""

from __future__ import annotations

from halogen_ascend.sim import sampling
from halogen_ascend.sim.buffer import DeviceBuffer
from halogen_ascend.sim.launcher import Launcher, Meta
from halogen_ascend.sim.tasks import Program
from halogen_core.spi import Sampled, StepBatch


def launch_sample(launcher: Launcher, logits: DeviceBuffer, meta: Meta) -> Sampled[DeviceBuffer]:
    """A token per row; parameters are host arguments, so a replay gives them anew."""
    rows, count = logits.shape[0], meta.host.sampling.num_logprobs
    count = min(count, logits.shape[1])
    new = launcher.device.empty
    made: Sampled[DeviceBuffer] = Sampled(
        token_ids=new((rows,), "i32"),
        logprobs=new((rows,), "f32") if count >= 0 else None,
        top_ids=new((rows, count), "i32") if count > 0 else None,
        top_logprobs=new((rows, count), "f32") if count > 0 else None,
    )
    launcher.device.submit("sample", lambda host: _program(launcher, logits, made, host), meta.host)
    return made


def _program(
    launcher: Launcher, logits: DeviceBuffer, made: Sampled[DeviceBuffer], host: StepBatch | None
) -> Program:
    assert host is not None
    values = launcher.device.read(logits, "sample", "logits").float()
    write = launcher.device.write
    ids = write(made.token_ids, "sample")
    own, top_ids, top_values = (
        None if b is None else write(b, "sample")
        for b in (made.logprobs, made.top_ids, made.top_logprobs)
    )

    def work(a: int, b: int) -> None:
        for row in range(a, b):
            ids[row] = sampling.pick(values[row], host.sampling, row)
            if own is None:
                continue
            logprobs = values[row].log_softmax(-1)
            own[row] = logprobs[ids[row]]
            if top_ids is not None and top_values is not None:
                top_ids[row], top_values[row] = sampling.top(logprobs, top_ids.shape[1])

    row = logits.shape[1] * 4
    return launcher.rows("sample", len(values), 3 * row, work, hbm=row)
