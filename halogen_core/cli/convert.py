"""`halogen convert`: quantise a model layer by layer."""

from __future__ import annotations

from pathlib import Path

import click

from halogen_core.errors import ConfigError


@click.command("convert")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--quantize", type=click.Choice(["w8a8", "w8a16"]), help="all linear layers")
@click.option("--quant-config", type=click.Path(path_type=Path), help="YAML: layer -> format")
@click.option("--check/--no-check", default=True, help="compare answers with the original")
@click.option("--rope-theta", type=float, help="must be the model's own; a guard for scripts")
def command(
    source: Path,
    target: Path,
    quantize: str | None,
    quant_config: Path | None,
    check: bool,
    rope_theta: float | None,
) -> None:
    """Write SOURCE, a Hugging Face directory, to TARGET with int8 layers.

    Layers: embedding, output, attention.qkv, attention.out, ffn.w1 (gate and up), ffn.w2 (down);
    formats: fp16 (as it is), w8a8, w8a16. Int8 runs natively on backends that say so.
    """
    from halogen_core.loader import open_model
    from halogen_core.loader.convert import QuantPlan, convert_directory

    if quantize is None and quant_config is None:
        raise ConfigError(
            "neither --quantize nor --quant-config is given",
            code="HRT-2012",
            fix="say what to convert to, e.g. --quantize w8a16",
        )
    own = open_model(source).hparams.get("rope.freq_base")
    if rope_theta is not None and own is not None and float(own) != rope_theta:
        raise ConfigError(
            f"--rope-theta {rope_theta:g} is not the model's {float(own):g} (config.json)",
            code="HRT-2012",
            fix="leave it out: the model's own is used",
        )
    plan = QuantPlan.read(quant_config) if quant_config else QuantPlan.whole(str(quantize))
    if quant_config is None and quantize == "w8a8":
        click.echo(
            "warning: activations of every layer are quantised; if answers repeat themselves, "
            "keep ffn.w2 at w8a16 or fp16 with --quant-config",
            err=True,
        )
    report = convert_directory(source, target, plan)
    worst = sorted(report.items(), key=lambda item: item[1])[:5]
    click.echo(f"{len(report)} tensors are int8; furthest from the original:")
    for key, decibels in worst:
        click.echo(f"  {decibels:6.1f} dB  {key}")
    if check:
        from halogen_core.cli.convert_check import compare, judge

        found = compare(source, target)
        click.echo(
            f"against the original: divergence {found.divergence:.4f} nats, same choice "
            f"{found.same_choice:.0%}, repeated triples {found.repetition:.0%} "
            f"(original {found.original_repetition:.0%})"
        )
        judge(found, target)
