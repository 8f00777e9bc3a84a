"""``vfl-server``: the aggregation server."""

from __future__ import annotations

from pathlib import Path

import click
from pydantic import TypeAdapter, ValidationError

from vfl_common.config.party import TlsSettings
from vfl_common.config.policy import Pin
from vfl_common.config.recipe import load_recipe
from vfl_common.errors import Code, InputError
from vfl_common.files import PLAIN_NAME
from vfl_common.process.logs import Console, version
from vfl_common.process.program import (
    EXIT_CODES,
    LINGER,
    LOG_STDOUT,
    METRICS,
    NAMES,
    PluginGroup,
    make_old_name,
    run_program,
)

_LISTEN = "0.0.0.0:7000"
_MAX_ROWS = 10_000_000
_RECIPE = click.argument("recipe", type=click.Path(path_type=Path))
_CA = click.option(
    "--ca",
    default="certs/ca.pem",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Read the CA certificate (PEM) from this file.",
)
_CERTIFICATE = click.option(
    "--certificate",
    type=click.Path(path_type=Path),
    help="Use this certificate for the server. [default: certs/<name>.pem]",
)
_KEY = click.option(
    "--key",
    type=click.Path(path_type=Path),
    help="Use this private key, mode 0600. [default: certs/<name>.key]",
)
_REVOKED = click.option(
    "--revoked",
    type=click.Path(path_type=Path),
    help="Read revoked certificates from this file. [default: revoked.txt, revoked.crl next to "
    "the CA, if "
    "they exist]",
)
_PASSPHRASE = click.option(
    "--passphrase-file",
    "passphrase",
    type=click.Path(path_type=Path),
    help="Read the key's passphrase from this file, mode 0600. [default: the variable "
    "VFL_TLS_PASSPHRASE]",
)


@click.group(
    cls=PluginGroup,
    entry_point_group="vfl_server.commands",
    epilog=EXIT_CODES,
    context_settings=NAMES,
)
@click.version_option(version() or "unknown")
def cli() -> None:
    """Run the aggregation server of a federation.

    The server keeps membership and run state, and aggregates weights. It never sees rows or labels.
    """


@cli.command(epilog=EXIT_CODES)
@_RECIPE
@click.option(
    "--listen",
    default=_LISTEN,
    show_default=True,
    help="Listen at host:port. Port 0 selects a free port.",
)
@_CA
@_CERTIFICATE
@_KEY
@_PASSPHRASE
@_REVOKED
@click.option(
    "--out",
    default="runs",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Write runs into this folder.",
)
@click.option(
    "--run-id", default="", help="Name the new run.  [default: made from time and recipe]"
)
@click.option(
    "--fresh",
    is_flag=True,
    help="Begin a new run even if --out has an unfinished one.",
)
@METRICS
@LINGER
@LOG_STDOUT
@click.option(
    "--predict",
    is_flag=True,
    help="Coordinate one joint prediction (vfl-party predict), not training.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="PARTY",
    help="With --predict, leave out this passive party, at every party. Repeatable.",
)
@click.option(
    "--pin",
    "pins",
    multiple=True,
    metavar="NAME=PIN",
    help="Accept only this key for a party, as `vfl certs show` prints.",
)
@click.option(
    "--rows-at-most",
    default=_MAX_ROWS,
    show_default=True,
    type=click.IntRange(min=1),
    help="Refuse a party with more rows (32 bytes each; rows.align = psi).",
)
def run(
    recipe: Path,
    listen: str,
    ca: Path,
    certificate: Path | None,
    key: Path | None,
    revoked: Path | None,
    out: Path,
    run_id: str,
    fresh: bool,
    metrics: str,
    linger_s: float,
    predict: bool,
    without: tuple[str, ...],
    passphrase: Path | None,
    pins: tuple[str, ...],
    rows_at_most: int,
) -> None:
    """Wait for the parties of RECIPE, run the recipe once, and end.

    The summary is <out>/<run id>/summary.json. After a crash the same command resumes the
    unfinished run. The parties rejoin and return to their newest common checkpoint.

    \b
    Example: vfl-server run recipe.toml --listen 0.0.0.0:7000 --ca certs/ca.pem
    """
    from vfl_server.app import ServerApp

    loaded = load_recipe(recipe)
    if without and not predict:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--without {without[0]}: applies only to a prediction, because training needs all "
            "parties. Add "
            "--predict, or remove it.",
        )
    loaded = loaded.without(without) if without else loaded
    if run_id and not PLAIN_NAME.fullmatch(run_id):
        raise click.BadParameter(
            "must be at most 200 letters, digits, '.', '_' and '-'", param_hint="--run-id"
        )
    ServerApp(
        loaded,
        _tls(loaded.server, ca, certificate, key, revoked, passphrase),
        listen,
        out,
        Console("vfl-server"),
        job="predict" if predict else "train",
        run_id=run_id,
        fresh=fresh,
        metrics=metrics,
        linger_s=linger_s,
        pins=_pins(pins),
        max_rows=rows_at_most,
    ).run()


@cli.command(epilog=EXIT_CODES)
@_RECIPE
@click.option(
    "--listen",
    default=_LISTEN,
    show_default=True,
    help="Ask at this address, where `run` listens. Port 0 is refused.",
)
@_CA
@_CERTIFICATE
@_KEY
@_PASSPHRASE
@_REVOKED
@click.option(
    "--wait",
    "wait_s",
    default=3.0,
    show_default=True,
    help="Wait at most this many seconds for the answer.",
)
def health(
    recipe: Path,
    listen: str,
    ca: Path,
    certificate: Path | None,
    key: Path | None,
    revoked: Path | None,
    passphrase: Path | None,
    wait_s: float,
) -> None:
    """Ask whether the server of RECIPE is running and serving.

    The exit code is 0 if the server serves (grpc.health.v1, on this machine). The call uses the
    server's own certificate. Use it for the health check of a container or supervisor.

    \b
    Example: vfl-server health recipe.toml --listen 0.0.0.0:7000 --ca certs/ca.pem
    """
    from vfl_common.identity.credentials import collect_members, load_credentials
    from vfl_common.rpc.health import require_serving

    loaded = load_recipe(recipe)
    name = loaded.server
    tls = _tls(name, ca, certificate, key, revoked, passphrase)
    address = require_serving(
        listen, load_credentials(tls, name=name, members=collect_members(loaded)), wait_s
    )
    click.echo(f"{name} at {address} serves")


def _pins(texts: tuple[str, ...]) -> dict[str, str]:
    """Reads the ``--pin`` options, each ``NAME=PIN``. Raises click.BadParameter if one is not valid
    or a name occurs twice.
    """
    pins: dict[str, str] = {}
    for text in texts:
        name, _, pin = text.partition("=")
        try:
            pins[name] = TypeAdapter(Pin).validate_python(pin)
        except ValidationError:
            raise click.BadParameter(
                f"write NAME=PIN, the pin as `vfl certs show` prints it: {text!r}"
            ) from None
    if len(pins) < len(texts):
        raise click.BadParameter("a party has two pins; set one pin a party", param_hint="--pin")
    return pins


def _tls(
    name: str,
    ca: Path,
    certificate: Path | None,
    key: Path | None,
    revoked: Path | None,
    passphrase: Path | None,
) -> TlsSettings:
    return TlsSettings(
        ca=str(ca),
        certificate=str(certificate or ca.parent / f"{name}.pem"),
        key=str(key or ca.parent / f"{name}.key"),
        passphrase_file=str(passphrase) if passphrase is not None else None,
        revoked=str(revoked) if revoked is not None else None,
    )


cli.add_command(make_old_name(run, "serve", "vfl-server"))


def main() -> None:
    """Runs the program."""
    run_program(cli, "vfl-server", private=True)


if __name__ == "__main__":
    main()
