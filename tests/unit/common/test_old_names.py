"""Old names of commands and flags: they do what the new ones do, and warn."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from vfl_common.process.program import flag_with_old_name, make_old_name
from vfl_party.cli import cli as party
from vfl_server.cli import cli as server


@click.group()
def program() -> None:
    """A program."""


@program.command()
@flag_with_old_name("--new", "--old", "Set it.")
@click.argument("word")
def act(new: bool, word: str) -> None:
    """Print what was given."""
    click.echo(f"{word} {new}")


program.add_command(make_old_name(act, "do", "program"))


@pytest.mark.parametrize("command", ["act", "do"])
@pytest.mark.parametrize("flag", [None, "--new", "--old"])
def test_an_old_name_warns_and_does_the_same(command: str, flag: str | None) -> None:
    result = CliRunner().invoke(program, [command, "word", *([flag] if flag else [])])
    assert result.exit_code == 0
    assert result.stdout == f"word {flag is not None}\n"
    warnings = ["warning: --old is deprecated. Use --new."] if flag == "--old" else []
    if command == "do":
        warnings.append("warning: `program do` is deprecated. Use `program act`.")
    assert result.stderr.splitlines() == warnings


def test_old_names_are_not_listed() -> None:
    assert CliRunner().invoke(program, ["--help"]).stdout.count("Print what was given") == 1
    assert "--old" not in CliRunner().invoke(program, ["act", "--help"]).stdout


@pytest.mark.parametrize(
    ("cli", "old", "new"), [(server, "serve", "run"), (party, "revoke", "revoke-grant")]
)
def test_the_programs_have_their_old_names(cli: click.Group, old: str, new: str) -> None:
    context = click.Context(cli)
    alias, command = cli.get_command(context, old), cli.get_command(context, new)
    assert alias is not None
    assert command is not None
    assert alias.params == command.params
    assert (alias.hidden, command.hidden) == (True, False)
