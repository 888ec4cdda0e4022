"""`halogen run`: answer a prompt, or chat."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
import msgspec

from halogen_core.cli.interrupts import ended_by_ctrl_c
from halogen_core.cli.main import INTERRUPTED
from halogen_core.cli.settings import SettingsCommand, with_settings
from halogen_core.config import Config
from halogen_core.engine.sampling_ranges import Seed, Temperature, TopP
from halogen_core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from halogen_core.cli.chat_session import Ask, Session


def _as(kind: object) -> Callable[[click.Context, click.Parameter, str | None], float | None]:
    """Reads a flag as a type of `sampling_ranges`, as the server reads a field."""

    def read(_: click.Context, flag: click.Parameter, value: str | None) -> float | None:
        if value is None:
            return None
        try:
            number: float = msgspec.convert(value, kind, strict=False)
        except msgspec.ValidationError as exc:
            allowed = str(exc).partition(",")[0].removeprefix("Expected ").replace("`", "")
            text = f"`{flag.opts[0]}` is `{value}`; allowed is {allowed}"
            raise ConfigError(text, code="HRT-1002") from None
        return number

    return read


@click.command("run", cls=SettingsCommand)
@click.argument("prompt", required=False)
@click.option("--raw", is_flag=True, help="continue the text as it is, without chat template")
@click.option("--system", help="system message")
@click.option("--max-tokens", type=click.IntRange(1), help="longest answer")
@click.option(
    "--temperature", metavar="NUMBER", callback=_as(Temperature), help="0 is greedy [default: 0.7]"
)
@click.option("--top-p", metavar="NUMBER", callback=_as(TopP), help="nucleus")
@click.option("--seed", metavar="INTEGER", callback=_as(Seed), help="same seed, same answer")
@click.option("--greedy", is_flag=True, help="always the most likely token")
@click.option("--json", "as_json", is_flag=True, help="one JSON object instead of text")
@with_settings("model", "engine", "cache", "paths", leave_out=("served_model_name", "max_queue"))
def command(  # noqa: PLR0913 - a command line has many flags
    config: Config,
    *,
    prompt: str | None,
    raw: bool,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    greedy: bool,
    as_json: bool,
) -> None:
    """Answer PROMPT, or chat when there is none (Ctrl-C stops an answer, Ctrl-D leaves).

    Without PROMPT and with standard input from a pipe, the prompt is read from there.
    """
    if greedy and temperature:
        raise ConfigError(
            f"`--greedy` and `--temperature {temperature:g}` contradict each other",
            code="HRT-1003",
            fix="remove one of the two",
        )
    if raw and system:
        raise ConfigError("`--raw` takes no `--system` message", code="HRT-1003", fix="remove one")
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().strip()
    if as_json and prompt is None:
        raise ConfigError("`--json` needs a prompt", code="HRT-1002", fix="add one")
    if prompt is not None and not raw:
        _refuse_empty(prompt)
    ask = _ask(raw, max_tokens, 0.0 if greedy else temperature, top_p, seed)
    with asyncio.Runner() as runner, _session(runner, config, ask, system) as session:
        if prompt is None:
            _chat(runner, session)
        else:
            _one_shot(runner, session, prompt, as_json)


def _refuse_empty(prompt: str) -> None:
    """A chat template around nothing would be answered with whatever the model likes."""
    if not prompt.strip():
        fix = "write one, or leave it out to chat"
        raise RequestError("the prompt is empty", code="HRT-4003", fix=fix)


def _ask(
    raw: bool,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
) -> Ask:
    from halogen_core.cli.chat_session import Ask
    from halogen_core.engine.protocol import SamplingParams

    sampling = SamplingParams(
        temperature=0.7 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        seed=seed,
    )
    return Ask(sampling=sampling, max_tokens=max_tokens, raw=raw)


@contextmanager
def _session(
    runner: asyncio.Runner, config: Config, ask: Ask, system: str | None
) -> Iterator[Session]:
    """A session, with a sign of life on the terminal while the model loads."""
    with ended_by_ctrl_c(), _loading_shown(f"loading {config.model.model}") as progress:
        from halogen_core.cli.assembly import assemble
        from halogen_core.cli.chat_session import Session, load_engine
        from halogen_core.loader.chat_template import has_chat_template

        parts = assemble(config)
        parts.tokenizer.prepare()
        engine = load_engine(parts, progress=progress)
    session = runner.run(Session.open(engine, parts.tokenizer, ask, system))
    if not ask.raw and not has_chat_template(parts.tokenizer):
        click.echo("note: the model brings no chat template; ChatML is assumed", err=True)
    try:
        yield session
    finally:
        runner.run(session.close())


@contextmanager
def _loading_shown(text: str) -> Iterator[Callable[[int, int], None]]:
    """A line on a terminal while the model loads; the cursor stays, so it may break off."""

    def show(words: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r{words:<{len(text) + 7}}", nl=False, err=True)

    show(text)
    try:
        yield lambda done, total: show(f"{text}: {100 * done // max(1, total)} %")
    finally:
        show("")
        show("\r")


def _one_shot(runner: asyncio.Runner, session: Session, prompt: str, as_json: bool) -> None:
    try:
        answer = runner.run(session.answer(prompt, _ignore if as_json else _show))
    except KeyboardInterrupt:
        click.echo()
        sys.exit(INTERRUPTED)
    if as_json:
        click.echo(json.dumps(answer.report(session.engine.info), ensure_ascii=False, indent=2))
    else:
        click.echo()


def _chat(runner: asyncio.Runner, session: Session) -> None:
    """Questions and answers until end of file."""
    info = session.engine.info
    click.secho(f"{info.model_id} on {info.backend} ({info.device}); Ctrl-D leaves", dim=True)
    while (prompt := _question()) is not None:
        if not prompt.strip():
            continue
        try:
            runner.run(session.answer(prompt, _show))
        except KeyboardInterrupt:
            click.secho(" [stopped]", dim=True, nl=False)
        click.echo()


def _question() -> str | None:
    """A line from the user; None at the end."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` line editing
    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            click.secho("\nCtrl-D leaves", dim=True)
        except EOFError:
            click.echo()
            return None


def _show(text: str) -> None:
    click.echo(text, nl=False)
    sys.stdout.flush()


def _ignore(text: str) -> None:
    """Nothing is shown while a JSON answer is made."""
