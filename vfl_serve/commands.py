"""``vfl-party serve`` and ``vfl-party token``."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from vfl_common.config.party import PartyFile, load_party
from vfl_common.errors import Code, InputError
from vfl_common.process.logs import Console
from vfl_common.process.program import EXIT_CODES, LOG_STDOUT, METRICS, flag_with_old_name


@click.command(epilog=EXIT_CODES)
@click.argument("party", type=click.Path(path_type=Path))
@click.option(
    "--run",
    "trained",
    required=True,
    multiple=True,
    metavar="RUN",
    help="Serve this run (id, folder, latest, production or NAME:production; repeatable).",
)
@click.option(
    "--data",
    metavar="SOURCE",
    help="Replace the party file's data.source.",
)
@flag_with_old_name(
    "--student",
    "--solo",
    "Score with the run's student, without passive parties (active party).",
)
@click.option("--http", metavar="HOST:PORT", help="Replace the party file's serve.http.")
@click.option("--device", metavar="cpu|cuda|cuda:N", help="Replace the party file's device.")
@METRICS
@LOG_STDOUT
def serve(
    party: Path,
    trained: tuple[str, ...],
    data: str | None,
    student: bool,
    http: str | None,
    device: str | None,
    metrics: str,
) -> None:
    """Serve trained models until the program is stopped.

    Every party runs this; no server is needed. The active party answers HTTP: POST /v1/predict with
    ids, the Open Inference Protocol under /v2, MLflow's /invocations; /docs shows all of it. A
    passive party opens no port: it keeps a stream to the active party (active in its file), and
    answers with embeddings of the ids in its table. A table that changes is read again. Each row of
    an answer says which parties took part, and why others did not.

    With --run production the run that is promoted next takes over as soon as all parties serve it,
    and no request is lost; the one before stays ready for a rollback.

    \b
    Examples:
      vfl-party serve bank.toml --run production
      vfl-party serve bank.toml --run churn:production --run fraud:production
      curl 127.0.0.1:8080/v1/predict -d '{"ids": ["K-1017"]}' -H 'content-type: application/json'
    """
    from vfl_common.config.base import parse
    from vfl_common.config.recipe import load_recipe
    from vfl_common.registry import ModelRegistry
    from vfl_serve.models import choose
    from vfl_serve.run import ServingParty

    file = load_party(party)
    registry = ModelRegistry(Path(file.out), file.name)
    chosen = [
        choose(registry, name, lambda: load_recipe(Path(file.recipe)).name) for name in trained
    ]
    if http is not None:
        fields = {**file.serve.model_dump(), "http": http}
        file = file.model_copy(update={"serve": parse(type(file.serve), fields, "--http")})
    serving = ServingParty(
        party, file, chosen, Console("vfl-party"), device, data, metrics, student
    )
    serving.run(listens=http is not None)


@click.command(epilog=EXIT_CODES)
@click.argument("party", type=click.Path(path_type=Path))
@click.argument("name")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="Limit the token to this recipe or run id (repeatable). [default: any]",
)
@click.option("--rows-a-day", type=click.IntRange(1), help="Limit the rows per day (UTC).")
@click.option("--until", type=click.DateTime(["%Y-%m-%d"]), help="Set the token's last day.")
@click.option("--remove", is_flag=True, help="Remove the token with this name.")
def token(
    party: Path,
    name: str,
    models: tuple[str, ...],
    rows_a_day: int | None,
    until: datetime | None,
    remove: bool,
) -> None:
    """Add or remove a token for the served models.

    A new token is printed once: the file serve.tokens of the party file PARTY keeps only its
    SHA-256. A serving party reads the file again when it changes.

    \b
    Examples:
      vfl-party token bank.toml shop-app --rows-a-day 10000 --until 2027-01-31
      vfl-party token bank.toml shop-app --remove
    """
    from vfl_serve.tokens import add_token, remove_token

    path = _tokens_of(load_party(party), party)
    if remove:
        remove_token(path, name)
        click.echo(f"{path}: the token {name!r} is removed")
        return
    if until is not None and until.date() < datetime.now(UTC).date():
        raise InputError(
            Code.CONFIG_INVALID, f"--until: {until.date()} is in the past. Give a future day."
        )
    facts = {
        "models": models or ("*",),
        "rows_a_day": rows_a_day,
        "until": until.date() if until is not None else None,
    }
    click.echo(add_token(path, name, **facts))
    click.echo(f"{path}: stores only the digest; the token is not shown again", err=True)


def _tokens_of(file: PartyFile, party: Path) -> Path:
    if file.serve.tokens is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f'{party}: names no token file. Set serve.tokens, for example to "tokens.json".',
        )
    return Path(file.serve.tokens)
