"""`halogen simulate`: size a box, or compare eviction policies, without the box."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import attrs
import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from halogen_core.errors import ConfigError
from halogen_core.kv.policies import EVICTION_POLICIES
from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.scheduler.policies import SCHEDULING_POLICIES
from halogen_core.simulation.caching import agent_trace, compare_policies
from halogen_core.simulation.capacity import Capacity, Scenario, measure
from halogen_core.simulation.device import PROFILES, load_profile
from halogen_core.simulation.plot import line_plot

GIB = 1 << 30


@click.group("simulate")
def command() -> None:
    """Size a box by simulation: the real scheduler on a device that is a cost model."""


@command.command("capacity")
@click.option(
    "--profile",
    default="unified-256GBps-8B-q4",
    show_default=True,
    help=f"a TOML file, or one of {', '.join(PROFILES)}",
)
@click.option("--rates", default="0.1,0.2,0.5,1,2", show_default=True, help="requests per second")
@click.option("--pool-gib", default=16.0, show_default=True, help="size of the KV pool")
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(1))
@click.option("--max-batch", default=64, show_default=True, type=click.IntRange(1))
@click.option("--max-batch-tokens", default=2048, show_default=True, type=click.IntRange(1))
@click.option("--max-queue", default=256, show_default=True, type=click.IntRange(0))
@click.option("--tpot-target-ms", type=float, help="bound steps so that running answers keep this")
@click.option("--long-prompt-tokens", type=int, help="longer prompts take the long lane")
@click.option(
    "--scheduling-policy",
    default="fcfs",
    show_default=True,
    type=click.Choice([spec.name for spec in SCHEDULING_POLICIES]),
)
@click.option(
    "--eviction-policy",
    default="lru",
    show_default=True,
    type=click.Choice([spec.name for spec in EVICTION_POLICIES]),
)
@click.option("--arrivals", default="poisson", type=click.Choice(["poisson", "bursty"]))
@click.option("--load", default="mixed", type=click.Choice(["mixed", "agents"]))
@click.option("--duration", default=120.0, show_default=True, help="seconds of arrivals")
@click.option("--seed", default=0, show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), help="write the percentiles as SVG")
@click.option("--json", "as_json", is_flag=True, help="for programs")
def capacity(
    rates: str,
    profile: str,
    pool_gib: float,
    plot: Path | None,
    as_json: bool,
    **options: object,
) -> None:
    """Time to first token and per output token against requests per second."""
    scenario = _scenario(profile, pool_gib, options)
    results = [measure(scenario, rate) for rate in _numbers(rates)]
    if as_json:
        click.echo(json.dumps([attrs.asdict(result) for result in results], indent=2))
    else:
        Console().print(_capacity_table(results, scenario))
    if plot is not None:
        plot.write_text(_capacity_plot(results, scenario), encoding="utf-8")


@command.command("eviction")
@click.option("--agents", default=4, show_default=True, type=click.IntRange(1))
@click.option("--shares", default="0.5,0.75,1", show_default=True, help="pool / all conversations")
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="for programs")
def eviction(agents: int, shares: str, block_size: int, seed: int, as_json: bool) -> None:
    """Tokens that agents' conversations compute again, per policy and against the optimum."""
    trace = agent_trace(agents=agents, seed=seed)
    longest = max(len(access.tokens) for access in trace)
    rows = []
    for share in _numbers(shares):
        blocks = max(longest // block_size + 2, int(share * agents * longest / block_size))
        for result in compare_policies(trace, blocks, block_size):
            rows.append({"share": share, "blocks": blocks, **attrs.asdict(result)})
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table("pool", "blocks", "policy", "recomputed tokens", "of prompt tokens")
    for row in rows:
        part = row["recomputed_tokens"] / row["prompt_tokens"]
        table.add_row(
            f"{row['share']:g}",
            str(row["blocks"]),
            row["policy"],
            f"{row['recomputed_tokens']:,}",
            f"{part:.1%}",
        )
    Console().print(table)


def _scenario(profile: str, pool_gib: float, options: dict[str, object]) -> Scenario:
    device = load_profile(profile)
    target = options["tpot_target_ms"]
    block_size = options["block_size"]
    assert isinstance(block_size, int)
    num_blocks = int(pool_gib * GIB / (device.kv_bytes_per_token * block_size))
    known = {field.name for field in attrs.fields(SchedulerConfig)}
    config = SchedulerConfig(
        **{name: value for name, value in options.items() if name in known},  # type: ignore[arg-type]
        tpot_target_s=target / 1e3 if isinstance(target, float) else None,
    )
    return Scenario(
        device=device,
        config=config,
        num_blocks=num_blocks,
        block_size=block_size,
        scheduling=str(options["scheduling_policy"]),
        eviction=str(options["eviction_policy"]),
        arrivals=str(options["arrivals"]),
        load=str(options["load"]),
        duration_s=float(str(options["duration"])),
        seed=int(str(options["seed"])),
    )


def _numbers(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as exc:
        raise ConfigError(
            f"`{text}` is not a list of numbers such as 0.5,1,2", code="HRT-4111"
        ) from exc
    if not all(0 < value < float("inf") for value in values):
        raise ConfigError(f"`{text}` holds a number that is not above 0", code="HRT-4111")
    return values


def _capacity_table(results: Sequence[Capacity], scenario: Scenario) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        title=f"simulated: {scenario.device.name}, {scenario.num_blocks} blocks, {scenario.load}",
        caption="times are p50 / p95",
    )
    names = ("req/s", "done", "refused", "TTFT s", "TPOT ms", "tok/s", "busy", "hits", "preempted")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        table.add_row(
            f"{r.rate:g}",
            str(r.finished),
            str(r.refused),
            f"{r.ttft_p50:.2f} / {r.ttft_p95:.2f}",
            f"{r.tpot_p50 * 1e3:.1f} / {r.tpot_p95 * 1e3:.1f}",
            f"{r.output_tokens_per_s:.0f}",
            f"{r.utilization:.0%}",
            f"{r.cache_hit_ratio:.0%}",
            str(r.preemptions),
        )
    return table


def _capacity_plot(results: Sequence[Capacity], scenario: Scenario) -> str:
    return line_plot(
        f"simulated: {scenario.device.name}, {scenario.load} load",
        "requests per second",
        "seconds (TPOT: x 10)",
        {
            "TTFT p50": [(r.rate, r.ttft_p50) for r in results],
            "TTFT p95": [(r.rate, r.ttft_p95) for r in results],
            "TPOT p50 x 10": [(r.rate, 10 * r.tpot_p50) for r in results],
            "TPOT p95 x 10": [(r.rate, 10 * r.tpot_p95) for r in results],
        },
    )
