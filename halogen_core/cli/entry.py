"""The `halogen` program, from its first import on: Ctrl-C ends it without a trace."""

from halogen_core.cli.interrupts import ended_by_ctrl_c


def main() -> None:
    """Run the command line; importing it takes a tenth of a second, in which nothing is begun."""
    with ended_by_ctrl_c():
        from halogen_core.cli.main import main as commands
    commands()
