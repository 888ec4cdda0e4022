"""Commands that this plugin adds to `halogen`."""

from __future__ import annotations

from pathlib import Path

import attrs
import click

from halogen_ascend.bandwidth_command import bandwidth_command
from halogen_ascend.drawing import chrome_trace, svg
from halogen_ascend.explain import Explained, StepSize, explain_step, shape_called, shapes
from halogen_ascend.explain_batching import explain_batching_command
from halogen_ascend.options import SimOptions, sim_options
from halogen_core.spi import BackendOptions, ConfigError


def add_commands(group: click.Group) -> None:
    """Called through the hook `halogen_cli_commands`."""
    group.add_command(explain_step_command)
    group.add_command(explain_batching_command)
    group.add_command(bandwidth_command)


_POSITIVE = click.IntRange(min=1)


@click.command("explain-step")
@click.option("--backend", default="ascend", show_default=True, help="Only `ascend` answers here.")
@click.option("--device", default="ascend:sim:910B2", show_default=True)
@click.option("--shape", default="qwen3-14b", show_default=True, help=", ".join(shapes()))
@click.option("--sequences", default=1, show_default=True, type=click.IntRange(1, 4096))
@click.option("--context", default=8192, show_default=True, type=click.IntRange(1, 1 << 20))
@click.option(
    "--queries", default=1, show_default=True, type=_POSITIVE, help="New tokens per sequence."
)
@click.option("--layers", default=1, show_default=True, type=_POSITIVE, help="Layers to draw.")
@click.option(
    "--ranks", default=1, show_default=True, type=_POSITIVE, help="Parts that share each layer."
)
@click.option("--backend-option", "extra", multiple=True, metavar="KEY=VALUE")
@click.option("--svg", "svg_path", type=click.Path(path_type=Path), help="Write a drawing.")
@click.option("--trace", "trace_path", type=click.Path(path_type=Path), help="Write a trace.")
def explain_step_command(
    backend: str,
    device: str,
    shape: str,
    svg_path: Path | None,
    trace_path: Path | None,
    extra: tuple[str, ...],
    **sizes: int,
) -> None:
    """Show what one step does on every core of a simulated part, and where cores idle."""
    if backend != "ascend":
        raise ConfigError(
            f"backend `{backend}` cannot explain a step", code="HRT-7109", fix="--backend ascend"
        )
    size = StepSize(**sizes)
    if not 1 <= size.queries <= size.context:
        raise ConfigError(
            f"{size.queries} new tokens do not fit a context of {size.context}",
            code="HRT-7109",
            fix="check --queries and --context",
        )
    pairs = (item.partition("=") for item in extra)
    options = sim_options(
        BackendOptions(device=device, extra={key: value for key, _, value in pairs})
    )
    told = explain_step(options, shape_called(shape), size)
    _print(told, options)
    _compare(told, options, shape, size)
    title = f"{shape} on {options.part.name}: {size.sequences} x {size.context} tokens"
    title += f", one of {size.ranks} ranks" if size.ranks > 1 else ""
    if svg_path:
        _write(svg_path, svg(told.spans, options.part, title))
    if trace_path:
        _write(trace_path, chrome_trace(told.spans, options.part))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(
            f"`{path}` cannot be written: {exc.strerror}",
            code="HRT-7109",
            fix="name a file in a folder that exists and is yours",
        ) from exc


def _print(told: Explained, options: SimOptions) -> None:
    part = options.part
    click.echo(
        f"{part.name}: {part.cube_cores} cube + {part.vector_cores} vector cores, simulated time"
    )
    click.echo(f"{'op':<16}{'tasks':>7}{'us':>10}{'cores busy':>12}{'HBM MB':>9}{'crossed':>9}")
    for span in told.spans:
        plan = span.schedule
        click.echo(
            f"{span.op:<16}{len(plan.placed):>7}{plan.makespan * 1e6:>10.1f}"
            f"{plan.utilisation:>12.0%}{plan.hbm_bytes / 1e6:>9.2f}"
            f"{plan.crossed_bytes / max(plan.hbm_bytes, 1):>9.0%}"
        )
    click.echo(
        f"whole step, all layers: {told.step_s * 1e3:.2f} ms (launch {options.launch_s * 1e6:g} us)"
    )


def _compare(told: Explained, options: SimOptions, shape: str, size: StepSize) -> None:
    """The same step with one task per KV head, when the plan splits over KV blocks."""
    if not options.kv_split:
        return
    whole = explain_step(attrs.evolve(options, kv_split=0), shape_called(shape), size)
    a, b = whole.of("attention").schedule, told.of("attention").schedule
    click.echo(
        f"attention per head: {cube_busy(whole, options):.0%} of cube time busy, "
        f"{a.makespan * 1e6:.1f} us; split every {options.kv_split} KV blocks: "
        f"{cube_busy(told, options):.0%}, {b.makespan * 1e6:.1f} us "
        f"({a.makespan / b.makespan:.2f} x)"
    )


def cube_busy(told: Explained, options: SimOptions) -> float:
    """Share of the cube cores' time in the attention that they work."""
    plan = told.of("attention").schedule
    cubes = [p for p in plan.placed if p.unit == "cube"]
    span = max(p.end for p in cubes) - min(p.start for p in cubes)
    return sum(p.end - p.start for p in cubes) / (span * options.part.cube_cores)
