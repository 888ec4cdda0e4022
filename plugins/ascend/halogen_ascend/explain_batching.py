"""`halogen explain batching`: what a batching window gives, in simulated time."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import click

from halogen_ascend.advice import Advice
from halogen_ascend.explain import Shape, shape_called, shapes
from halogen_ascend.heat import Heat
from halogen_ascend.options import SimOptions, sim_options
from halogen_ascend.scheduling.arrivals import bursty, poisson
from halogen_ascend.scheduling.serve import Outcome, serve_continuously, serve_statically
from halogen_ascend.scheduling.window import BatchBudget, BatchWindow
from halogen_ascend.sim.idle import IdleClock
from halogen_core.spi import BackendOptions, StepShape

_ARRIVALS = {"poisson": poisson, "bursty": bursty}


@click.command("explain-batching")
@click.option("--device", default="ascend:sim:910B2", show_default=True)
@click.option("--shape", default="qwen3-14b", show_default=True, help=", ".join(shapes()))
@click.option("--arrivals", default="poisson", type=click.Choice(sorted(_ARRIVALS)))
@click.option("--rate", default=5.0, show_default=True, help="Requests per second.")
@click.option("--seconds", default=120.0, show_default=True, help="Simulated.")
@click.option("--min-batch-window-ms", default=0.0, show_default=True)
@click.option("--max-batch-window-ms", default=10.0, show_default=True)
@click.option("--max-batch", default=64, show_default=True)
@click.option("--idle-frequency-boost", is_flag=True, help="Keep an idle part's clock up.")
def explain_batching_command(
    device: str,
    shape: str,
    arrivals: str,
    rate: float,
    seconds: float,
    **knobs: float,
) -> None:
    """Serve seeded arrivals in simulated time: static batches, and continuous ones."""
    low, high = knobs["min_batch_window_ms"] / 1e3, knobs["max_batch_window_ms"] / 1e3
    floor, window = BatchWindow(min_s=0.0, max_s=high), BatchWindow(min_s=low, max_s=high)
    options = sim_options(BackendOptions(device=device))
    model = shape_called(shape)
    advice = advice_for(options, model)
    boost = bool(knobs["idle_frequency_boost"])
    free = options.part.usable_bytes - advice.weight_bytes
    budget = BatchBudget(
        kv_tokens=int(max(free, 0) * 0.9 / advice.kv_bytes_per_token),
        step_tokens=8192,
        sequences=int(knobs["max_batch"]),
    )
    given = list(_ARRIVALS[arrivals](rate, seconds))
    click.echo(f"{len(given)} requests, {arrivals} {rate:g}/s, {shape} on {options.part.name}")
    click.echo(
        f"{'batching':<12}{'window ms':>10}{'busy':>7}{'rows':>7}{'TTFT p50':>10}{'p99 s':>8}"
    )
    for name, serve, waits in (
        ("static", serve_statically, window),
        ("continuous", serve_continuously, floor),
        ("continuous", serve_continuously, window),
    ):
        clock = IdleClock(boost=boost)
        _row(name, waits, serve(given, waits, budget, step_seconds(advice, clock)))
    if boost:
        click.echo(f"{clock.heartbeats} empty launches kept the clock up")


def advice_for(options: SimOptions, model: Shape) -> Advice:
    """The advice of a model known by its sizes only, 16-bit."""
    layer = model.hidden * (model.heads + 2 * model.kv_heads) * model.head_dim
    layer += model.hidden * model.heads * model.head_dim + 3 * model.hidden * model.ffn
    macs = model.layers * layer + model.hidden * model.vocab
    return Advice(
        options.part,
        Heat(name=options.part.name),
        launch_s=options.launch_s,
        weight_bytes=2 * macs,
        macs_per_token=macs,
        matrices=4 * model.layers + 1,
        kv_bytes_per_token=4.0 * model.layers * model.kv_heads * model.head_dim,
        layers=model.layers,
    )


def step_seconds(advice: Advice, clock: IdleClock) -> Callable[[StepShape, float], float]:
    """Device time of a step, at the clock that the pause before it left."""

    def seconds(shape: StepShape, now: float) -> float:
        took = advice.device_seconds(shape) / clock.share(now)
        advice.observe(shape, took)
        clock.worked(now + took)
        return took

    return seconds


def _row(name: str, window: BatchWindow, out: Outcome) -> None:
    first = sorted(s.ttft for s in out.served)
    tail = first[min(int(len(first) * 0.99), len(first) - 1)]
    click.echo(
        f"{name:<12}{window.min_s * 1e3:>10g}{out.utilisation:>7.0%}{out.mean_batch:>7.2f}"
        f"{statistics.median(first):>10.3f}{tail:>8.3f}"
    )
