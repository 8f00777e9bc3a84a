"""The commands of ``vfl`` that make, forecast and predict runs, and certificates. ``vfl new`` has a
module of its own.

Heavy modules are imported when a command is called.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from vfl.certs import CA_DAYS, LIST_DAYS, MAX_DAYS, PARTY_DAYS
from vfl.simulation import BASELINES
from vfl.summary.run_argument import out_option, run_argument
from vfl_common.errors import Code, InputError
from vfl_common.process.program import EXIT_CODES, WATCH, add_stop_text
from vfl_common.text import LINE, clean, to_json
from vfl_party.predict.options import result_options, without_option

DEMO = Path(__file__).with_name("demo.toml")
_json = click.option(
    "--json", "as_json", is_flag=True, help="Print summary.json as one line instead of the table."
)
_seed = click.option("--seed", type=click.IntRange(0), help="Replace the recipe's seed.")
_keep = click.option(
    "--keep-going", is_flag=True, help="Restart a party that was killed; it rejoins the run."
)


@click.command(epilog=EXIT_CODES)
@out_option
@_json
@_seed
@_keep
@WATCH
def demo(out: Path, as_json: bool, seed: int | None, keep_going: bool, watch: bool) -> None:
    """Run a built-in federation of a server and four parties.

    The server and the parties are five processes that use gRPC with mutual TLS. Each party has one
    quarter of scikit-learn's 8 x 8 pictures of digits. Only the party `bank` has the labels. The
    recipe is examples/digits.toml.

    \b
    Examples:
      vfl demo
      vfl demo --json | jq .metrics.test.accuracy
    """
    _simulate((DEMO,), out, as_json, seed, keep_going, None, watch)


@click.command(epilog=EXIT_CODES)
@click.argument(
    "files",
    metavar="RECIPE|PARTY-FILES...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
)
@out_option
@_json
@_seed
@_keep
@WATCH
@click.option(
    "--baseline",
    type=click.Choice(BASELINES),
    help="Run a baseline instead: one party, all columns, or boosted trees.",
)
def simulate(
    files: tuple[Path, ...],
    out: Path,
    as_json: bool,
    seed: int | None,
    keep_going: bool,
    watch: bool,
    baseline: str | None,
) -> None:
    """Run the server and all parties of RECIPE on this machine.

    The recipe's [simulate] table names the parties' data: one data set that is divided by columns,
    quadrants or halves, or a file for each party. Instead of a recipe, you can give the party files
    of all its parties, to test them together without keys and a network. Their data, encoders,
    devices and threads are used. With --baseline alone or gbdt-alone, the active party's file is
    enough. A temporary certificate authority is made for each run.

    \b
    In OUT/<run id>/:
      summary.json   metrics, bytes, seconds
      federation/    certificates, party files, the recipe, as each party would have them on its own machine
      <party>/       metrics.jsonl, log.jsonl, ledger.json, checkpoints/, stderr

    \b
    Examples:
      vfl simulate examples/breast-cancer.toml
      vfl simulate recipe.toml --seed 7 --json | tail -n 1 > result.json
      vfl simulate recipe.toml --baseline combined    what would all columns in one place give?
      vfl simulate bank.toml ../shop/shop.toml        what do our tables give together?
      vfl simulate bank.toml --baseline alone         what does my own table give? (the active party's file)
    """  # noqa: E501
    _simulate(files, out, as_json, seed, keep_going, baseline, watch)


def _simulate(
    files: tuple[Path, ...],
    out: Path,
    as_json: bool,
    seed: int | None,
    keep_going: bool,
    baseline: str | None,
    watch: bool,
) -> None:
    from vfl.simulation.run import simulate as run_simulation

    with add_stop_text("the same command begins a new run"):
        folder = run_simulation(
            files[0],
            out,
            others=files[1:],
            seed=seed,
            keep_going=keep_going,
            baseline=baseline,
            watch=watch,
        )
    if as_json:
        click.echo(to_json(json.loads((folder / "summary.json").read_bytes()), compact=True))
        return
    from vfl.summary.reading import find
    from vfl.summary.table import print_tables

    result = find(folder)
    print_tables(result.summary, result.phases)
    click.echo(f"To see a page and curves of this run: vfl report {folder}")


# -- vfl forecast
# ----------------------------------------------------------------------


@click.command(epilog=EXIT_CODES)
@click.argument(
    "plan",
    metavar="RECIPE|PARTY-FILES...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
)
@click.option(
    "--bandwidth",
    default="100Mbit/s",
    show_default=True,
    help="Set the bandwidth of each link: 10Mbit, 1Gbit/s, 100MB, …",
)
@click.option(
    "--latency",
    default="20ms",
    show_default=True,
    help="Set the one-way latency (half of ping's time): 20ms, 0.1s, …",
)
@click.option(
    "--rows",
    type=click.IntRange(1, 100_000_000),
    help="Assume this number of common rows instead of reading data.",
)
@click.option(
    "--rounds",
    multiple=True,
    metavar="PHASE=N",
    help="Count N rounds for a phase with early stopping.",
)
@click.option(
    "--step-time", default="0", show_default=True, help="Set the computing time of a step: 1.5ms, …"
)
@click.option(
    "--measure", is_flag=True, help="Measure the computing time of a step in this process."
)
@click.option(
    "--cores",
    type=click.IntRange(1),
    help="Set the cores of the machine that all parties share.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 1024),
    help="Include the time of masking ids with this many processes.",
)
@click.option(
    "--suggest",
    is_flag=True,
    help="Suggest codecs and steps in flight for this link.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of the tables.")
def forecast(
    plan: tuple[Path, ...],
    bandwidth: str,
    latency: str,
    rows: int | None,
    rounds: tuple[str, ...],
    step_time: str,
    measure: bool,
    cores: int | None,
    workers: int | None,
    suggest: bool,
    as_json: bool,
) -> None:
    """Forecast the bytes and the time of RECIPE before it runs.

    The bytes are counted for each party, phase and direction. RECIPE may also be a party file,
    whose data then give the number of rows. The party files of all parties together are one recipe,
    as for vfl simulate. --rows is the number of rows that all parties hold, or, with rows.align =
    "none", that each passive party holds. Messages are counted with their exact sizes. The sessions
    with the server are not counted, because they grow with time. The time includes communication,
    and computation with --step-time or --measure. --workers measures the time to mask one batch of
    ids, with one core for each process.

    \b
    Examples:
      vfl forecast examples/digits.toml
      vfl forecast recipe.toml --rows 250000 --bandwidth 1Gbit/s --latency 5ms
      vfl forecast recipe.toml --bandwidth 10Mbit/s --latency 25ms --step-time 2ms --suggest
      vfl forecast bank.toml --json
      vfl forecast bank.toml ../shop/shop.toml --measure
    """
    from vfl.forecasting.network import Network
    from vfl.forecasting.show import show_forecast

    if measure and step_time != "0":
        raise InputError(
            Code.CONFIG_INVALID, "--step-time: cannot be combined with --measure. Give one of them."
        )
    if cores is not None and not measure:
        raise InputError(
            Code.CONFIG_INVALID,
            "--cores: needs --measure, which measures all parties. Add --measure.",
        )
    network = Network.read(bandwidth, latency, step_time, cores)
    show_forecast(
        plan,
        network,
        rows=rows,
        rounds=rounds,
        as_json=as_json,
        measure=measure,
        suggest=suggest,
        workers=workers,
    )


# -- vfl predict
# ----------------------------------------------------------------------


@click.command(epilog=EXIT_CODES)
@run_argument
@click.option(
    "--data",
    multiple=True,
    metavar="NAME=SOURCE",
    help="Predict these rows of party NAME; repeat for each party.",
)
@click.option(
    "--query",
    multiple=True,
    metavar="NAME=SELECT",
    help="Select the new rows of NAME with this query (databases only).",
)
@without_option
@result_options
def predict(
    run: Path,
    data: tuple[str, ...],
    query: tuple[str, ...],
    without: tuple[str, ...],
    output: Path,
    like_input: bool,
    spreadsheet: bool,
    student: bool,
    replace: bool,
) -> None:
    """Predict rows with a run, all parties in this process.

    RUN is the folder of a run of `vfl simulate` or of the library. By default, it is the newest
    finished run of a federation (not of a baseline) in the folder runs. Without --data, the
    training run's own rows are predicted again. SOURCE is a file, or any other source that a party
    file may name. A database uses the query of training unless --query gives another query. SOURCE
    needs the columns that the party had in training, but no label. The result has a row for each
    row of the active party's table, in the same order, with the party's own ids. With --student,
    only the active party's rows are needed: the run's student scores them. Between organisations,
    every party runs `vfl-party predict`.

    \b
    Examples:
      vfl predict --out again.csv
      vfl predict runs/20260101-120000-churn-1f2e --data bank=new.csv --data shop=new-shop.parquet
    """
    from vfl.library.run import Run, predict_rows
    from vfl_common import scorings
    from vfl_common.run_folder import RunFolder
    from vfl_party.predict.results import Output

    training_run = Run.load(run)
    folder, output_settings = training_run.folder, Output(output, like_input, spreadsheet, replace)
    result = predict_rows(
        folder,
        parse_data_options(data) or None,
        output_settings,
        _parse_by_name(query, "--query", "SELECT"),
        without,
        solo=student,
    )
    active = next(party.name for party in training_run.summary.parties if party.role == "active")
    scorings.note(
        folder.resolve().parent,
        party=active,
        recipe=RunFolder(folder / active, folder.name).recipe().name,
        model=folder.resolve().name,
        run="",
        rows=result.rows.rows,
        scored=result.rows.written,
        output=str(output.absolute()),
    )
    for text in result.notes:
        click.echo(clean(text, LINE), err=True)
    click.echo(result.rows, err=True)
    # The meaning contains the name of a class, which comes from the table.
    click.echo(clean(result.meaning, LINE), err=True)
    click.echo(output)


def parse_data_options(data: tuple[str, ...]) -> dict[str, str]:
    """Parses the options ``--data NAME=SOURCE`` to {party: source}. Raises InputError."""
    from vfl_common.config.sources import is_path, split_member

    sources = _parse_by_name(data, "--data", "SOURCE")
    for name, file in sources.items():
        if is_path(file) and not Path(split_member(file)[0]).exists():
            raise InputError(
                Code.FILE_INVALID, f"--data {name}={file}: no such file. Correct the path."
            )
    return sources


def _parse_by_name(values: tuple[str, ...], option: str, what: str) -> dict[str, str]:
    """Parses an option ``NAME=…``, which may be given once for each party. Raises InputError."""
    from vfl_common.text import hide_passwords

    result = dict[str, str]()
    for value in values:
        name, _, text = value.partition("=")
        if not (name and text):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{option}: must be NAME={what} (got {hide_passwords(value)}). Give a party's "
                "name and its rows.",
            )
        if name in result:
            raise InputError(
                Code.CONFIG_INVALID, f"{option} {name}=…: is given twice. Give it once."
            )
        result[name] = text
    return result


# -- vfl certs
# ----------------------------------------------------------------------


_FOLDER = click.Path(file_okay=False, path_type=Path)
_FILE = click.Path(dir_okay=False, path_type=Path)
_DAYS = click.IntRange(1, MAX_DAYS)
_DEFAULT = Path("certs")

_ca = click.option(
    "--ca",
    type=_FOLDER,
    default=_DEFAULT,
    show_default=True,
    help="Read the folder with ca.pem and ca.key.",
)
_days = click.option(
    "--days",
    type=_DAYS,
    default=PARTY_DAYS,
    show_default=True,
    help="Set the validity in days, at most that of the CA.",
)
_force = click.option("--force", is_flag=True, help="Replace existing files.")


@click.group()
def certs() -> None:
    """Make and show the certificates of a federation.

    \b
    One administrator makes all keys in one place:
      vfl certs ca --federation credit-risk
      vfl certs issue server bank shop
    \b
    Each organisation keeps its own key:
      vfl certs request bank          (at the bank; send certs/bank.csr)
      vfl certs sign certs/bank.csr   (at the authority; send back bank.pem and ca.pem)
    """


@certs.command()
@click.option(
    "--out", type=_FOLDER, default=_DEFAULT, show_default=True, help="Write to this folder."
)
@click.option(
    "--federation",
    default="vfl",
    show_default=True,
    help="Set the authority's name, for people to read.",
)
@click.option(
    "--days", type=_DAYS, default=CA_DAYS, show_default=True, help="Set the validity in days."
)
@click.option(
    "--force", is_flag=True, help="Replace the authority and invalidate all of its certificates."
)
def ca(out: Path, federation: str, days: int, force: bool) -> None:
    """Make the authority of a federation.

    Give ca.pem to every party, and ca.key to nobody.

    \b
    Example:
      vfl certs ca --out certs --federation credit-risk
    """
    from vfl.certs import authority

    path = authority.create_authority(out, federation, days, force=force)
    click.echo(f"{path}: for every party")
    click.echo(f"{out / 'ca.key'}: keep it secret; it can sign a certificate for any party")


@certs.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@_ca
@click.option(
    "--out", type=_FOLDER, help="Write the files to this folder [default: the authority's]."
)
@_days
@_force
def issue(names: tuple[str, ...], ca: Path, out: Path | None, days: int, force: bool) -> None:
    """Make a key and a certificate for each NAME.

    NAME is the name of the server or a party in the recipe. ca.pem is also copied to the folder
    --out, unless it has one.

    \b
    Examples:
      vfl certs issue server bank shop --ca certs --days 90
      vfl certs issue shop --out ../shop/certs
    """
    from vfl.certs import authority

    for name in names:
        authority.check_name(name)
    for name in names:
        tls = authority.issue(ca, name, days, out=out, force=force)
        click.echo(
            f"{name}: {tls.certificate} and {tls.key}; it also needs {authority.give_ca(ca, out)}"
        )


@certs.command()
@click.argument("name")
@click.option(
    "--out",
    type=_FOLDER,
    default=_DEFAULT,
    show_default=True,
    help="Write NAME.key and NAME.csr to this folder.",
)
@_force
def request(name: str, out: Path, force: bool) -> None:
    """Make a key and a request for the authority.

    Keep the key secret, and send the request to the authority.

    \b
    Example:
      vfl certs request bank
    """
    from vfl.certs import authority
    from vfl.certs.authority import fingerprint
    from vfl_common.identity import pem

    path = authority.create_request(out, name, force=force)
    click.echo(f"{out / name}.key: keep it secret; it stays here")
    click.echo(f"{path}: send it to the authority, for `vfl certs sign`")
    click.echo(
        f"the request's fingerprint: SHA-256 {fingerprint(pem.parse_request(pem.read(path), path))}"
    )


@certs.command()
@click.argument("csr", type=_FILE)
@click.option("--name", help="Name the sender [default: the file's name without .csr].")
@_ca
@click.option(
    "--out", type=_FOLDER, help="Write the certificate to this folder [default: the request's]."
)
@_days
@_force
def sign(csr: Path, name: str | None, ca: Path, out: Path | None, days: int, force: bool) -> None:
    """Sign the request CSR of a party.

    Before you send the certificate back, check that the party sees the same fingerprint.

    \b
    Example:
      vfl certs sign certs/bank.csr --ca certs
    """
    from vfl.certs import authority
    from vfl.certs.authority import fingerprint
    from vfl_common.identity import pem

    path = authority.sign_request(csr, ca, name or csr.stem, days, out=out, force=force)
    click.echo(
        f"the request's fingerprint: SHA-256 {fingerprint(pem.parse_request(pem.read(csr), csr))}"
    )
    click.echo(f"{path}: send it back, together with {ca / 'ca.pem'}")


@certs.command()
@click.argument("names", nargs=-1, metavar="[NAME...]")
@_ca
@click.option(
    "--days",
    type=_DAYS,
    default=LIST_DAYS,
    show_default=True,
    help="Set the validity of the signed list in days.",
)
def revoke(names: tuple[str, ...], ca: Path, days: int) -> None:
    """Add the certificate of each NAME to revoked.txt.

    NAME is a party, or a file NAME.pem. If the folder has ca.key, the signed list revoked.crl is
    also written. Without a NAME, the list is only signed again, which is necessary before its
    validity (--days) ends.

    The server and every party need the new list next to their ca.pem. They read it at each
    connection. Revoke a certificate before you replace it. Afterwards, you need the old file or the
    serial number to revoke it.

    \b
    Example:
      vfl certs revoke bank --ca certs
    """
    from vfl.certs import authority
    from vfl_common.identity.credentials import FILE

    for name in names:
        path, changed = authority.revoke(ca, name)
        click.echo(f"{name}: {'added to' if changed else 'was already in'} {path}")
    signed = authority.sign_list(ca, days)
    if signed is None and not names:
        raise click.UsageError(f"{ca}: has no ca.key to sign a list. Name a certificate to revoke.")
    for path in ([ca / FILE] if names else []) + ([signed] if signed is not None else []):
        until = f", valid for {days} days" if path == signed else ""
        click.echo(f"{path}: copy it next to ca.pem at the server and every party{until}")


@certs.command()
@click.argument("file", type=_FILE)
def show(file: Path) -> None:
    """Show the name, issuer and validity of a certificate.

    FILE is a certificate or a request.

    \b
    Example:
      vfl certs show certs/bank.pem
    """
    from vfl.certs.authority import describe

    for label, text in describe(file):
        click.echo(f"{label + ':':<13}{text}")
