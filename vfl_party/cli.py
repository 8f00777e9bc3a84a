"""``vfl-party``: a party of a federation, active or passive, on its own machine."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click

from vfl_common.config.party import PartyFile, load_party
from vfl_common.config.recipe import load_recipe, name_file_in_errors
from vfl_common.errors import Code, InputError
from vfl_common.process.logs import Console
from vfl_common.process.program import (
    EXIT_CODES,
    LINGER,
    LOG_STDOUT,
    METRICS,
    NAMES,
    WATCH,
    PluginGroup,
    do_last,
    run_program,
    watch_page,
)
from vfl_common.text import LINE, clean, hide_passwords, to_json
from vfl_party.predict.options import result_options, without_option

_DEVICE = click.option(
    "--device", metavar="cpu|cuda|cuda:N", help="Override the party file's device."
)
_WAIT = click.option(
    "--wait",
    "wait_s",
    default=60.0,
    show_default=True,
    help="Wait at most this many seconds for the server.",
)

# The exit code of a prediction that the active party wrote without the other parties.
NO_JOINT_SCORE = 5
# The width in characters at which long lines are broken, unless the terminal is narrower.
_WIDTH = 120


@click.group(
    cls=PluginGroup,
    entry_point_group="vfl_party.commands",
    epilog=EXIT_CODES,
    context_settings=NAMES,
)
@click.version_option(package_name="vfl")
def cli() -> None:
    """Run a party of a federation.

    A party trains on its own columns, together with parties that have other columns.
    """


@cli.command(epilog=EXIT_CODES)
@click.argument("party", type=click.Path(path_type=Path))
@_DEVICE
@_WAIT
@click.option(
    "--fresh", is_flag=True, help="Start a new run instead of resuming an unfinished one."
)
@METRICS
@LINGER
@LOG_STDOUT
@click.option(
    "--report", is_flag=True, help="Draw the charts of `vfl report` after the run (active party)."
)
@WATCH
def run(
    party: Path,
    device: str | None,
    wait_s: float,
    fresh: bool,
    metrics: str,
    linger_s: float,
    report: bool,
    watch: bool,
) -> None:
    """Take part in a training run as the party of PARTY.

    After a crash the same command rejoins the run. Progress is shown in sentences at a terminal,
    and as JSON lines if standard output goes elsewhere.

    \b
    On four GPUs of one machine, with device = "cuda":
      torchrun --master-addr 127.0.0.1 --master-port 29400 --nproc-per-node 4 --no-python -- vfl-party run PARTY

    \b
    A party file (docs/reference/party-file.md has every key):
      name = "hospital"
      recipe = "recipe.toml"                # the same at every party
      server = "fed.example.org:7000"
      tls = { ca = "ca.pem", certificate = "hospital.pem", key = "hospital.key" }
      data = { source = "patients.csv", id = "patient", missing = "mean" }
    and at the active party: data.label, listen = "0.0.0.0:7001", advertise = "bank.example.org:7001"
    """  # noqa: E501
    from vfl_party.assembly.files import read_files
    from vfl_party.base.devices import read_launch
    from vfl_party.ranks import join_ranks
    from vfl_party.runtime.app import PartyApp
    from vfl_party.runtime.lending import lend_to_train

    if read_launch()[0]:
        lend_to_train(party, device)
        return
    files = read_files(party, device=device, joins=True)
    if report and not files.is_active:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{party}: --report requires the active party; {files.name} is passive and gets no "
            "summary. Remove --report.",
        )
    reporters = _load_reporters() if report else []
    console = Console("vfl-party")
    with (
        join_ranks(files.device, files.recipe.run.step_timeout_s) as ranks,
        watch_page(Path(files.file.out), wanted=watch),
        name_file_in_errors(Path(files.file.recipe)),
    ):
        app = PartyApp(files, console, wait_s, metrics=metrics, linger_s=linger_s, ranks=ranks)
        _, folder = app.train(fresh=fresh)
    if report:
        charts = [path for draw in reporters for path in draw(folder.path.parent)]
        console.emit("reported", charts=[str(path) for path in charts])
    # After this note, the same command begins a new run.
    do_last(folder.prepare_finished_note())
    console.emit("completed", run_id=folder.run_id, folder=str(folder.path))


@cli.command(epilog=EXIT_CODES)
@click.argument("party", type=click.Path(path_type=Path))
@_DEVICE
@click.option(
    "--offline", is_flag=True, help="Skip the connection to the server and the active party."
)
@click.option("-v", "--verbose", is_flag=True, help="Print all checks, in the order of a run.")
def check(party: Path, device: str | None, offline: bool, verbose: bool) -> None:
    """Check everything that a run of PARTY needs.

    Nothing is trained. A line with a problem says what to do. The command checks the party file and
    the recipe, the certificate, the device, the data (columns, types, missing values, label), the
    models, the free disk space and the addresses to listen on (also of serve). It asks the server
    whether it accepts this party: both compare recipe, protocol and plug-ins. It also asks the
    active party if the file has its address (active). A line that begins with note is about
    settings that can run but are perhaps not intended. FAIL, SOON and note come first.
    """
    from vfl_party.runtime.preflight import VERDICTS, require_ready
    from vfl_party.runtime.preflight import check as look

    findings = list(look(party, device, offline=offline))
    visible = findings
    if not verbose:
        visible = [finding for finding in findings if not finding.detail]
        visible.sort(key=lambda finding: VERDICTS.index(finding.verdict))
    for finding in visible:
        head = f"{finding.verdict:<4}  {finding.about:<12}  "
        indent = " " * (len(finding.text) - len(finding.text.lstrip(" ")))
        # Names and values from a table may contain control characters.
        text = indent + clean(finding.text, LINE)
        click.echo(_break_line(head, text) if finding.about == "leaves" else head + text)
    if len(visible) < len(findings):
        more = len(findings) - len(visible)
        click.echo(f"{more} more lines about columns, ids and the session: run with -v.")
    require_ready(findings)


@cli.command(epilog=EXIT_CODES)
@click.argument("party", type=click.Path(path_type=Path))
@click.option(
    "--run",
    "trained",
    required=True,
    metavar="RUN",
    help="Use this trained run: an id, a folder, production, or latest.",
)
@click.option(
    "--data",
    metavar="SOURCE",
    help="Predict the rows of this source instead of the party file's.",
)
@click.option(
    "--query",
    metavar="SELECT",
    help="Predict the rows of this query instead of the party file's.",
)
@without_option
@result_options
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(min=0.0, min_open=True, max=1e6),
    help="Wait at most this many seconds for the others. [default: predict.deadline_s]",
)
@_DEVICE
@_WAIT
@LOG_STDOUT
def predict(
    party: Path,
    trained: str,
    data: str | None,
    query: str | None,
    without: tuple[str, ...],
    output: Path,
    like_input: bool,
    spreadsheet: bool,
    student: bool,
    replace: bool,
    deadline_s: float | None,
    device: str | None,
    wait_s: float,
) -> int:
    """Take part in a joint prediction with a trained run.

    Every party runs this, with vfl-server run --predict at the server. All parties must give the
    same ids, unless the recipe has rows.align = "psi" or "fuzzy". Only the active party gets and
    writes the result: a row for each row of its table, in its order, with its own ids. At the end
    every party reports how many of its rows are predicted, and why the other rows are left out. If a
    party is missing past the deadline, the active party writes its rows without a joint score, and
    ends with exit code 5. With --student the active party contacts no other party and no server: the
    student model that the run has trained scores all of its rows.

    \b
    Examples:
      vfl-party predict bank.toml --run runs/20260102-030405-churn-1a2b --data new.csv --out churn.csv
      vfl-party predict bank.toml --run production --data new.csv --out churn.csv --replace
      vfl-party predict bank.toml --run production --data new.csv --out churn.csv --student
    """  # noqa: E501
    from vfl_common import scorings
    from vfl_common.registry import WORDS
    from vfl_party.assembly.files import read_files
    from vfl_party.base.devices import read_launch
    from vfl_party.data import Labels
    from vfl_party.predict.prediction import Alone
    from vfl_party.predict.results import Output, label_name, meaning
    from vfl_party.predict.run import load_joint, prediction_data
    from vfl_party.ranks import join_ranks
    from vfl_party.runtime.app import PartyApp
    from vfl_party.runtime.lending import lend_to_predict

    file = load_party(party)
    name = file.name
    trained_folder = _find_run_folder(trained, file)
    if student and without:
        raise InputError(
            Code.CONFIG_INVALID,
            "--student: cannot be combined with --without, because the active party scores on its "
            "own. Remove one of them.",
        )
    if student:
        destination = Output(output, like_input, spreadsheet, replace)
        return _predict_solo(party, trained_folder, data, query, destination, device)
    if read_launch()[0]:
        lend_to_predict(party, device, name, trained_folder, without, data, query)
        return 0
    try:
        trained_run = load_joint(trained_folder, name, without)
    except InputError:
        # The recipe in the party file names the server to which the error is reported.
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(InputError):
                stack.enter_context(read_files(party).telling())
            raise
    files = read_files(party, device=device, recipe=trained_run.recipe, joins=True)
    console = Console("vfl-party")
    if trained in WORDS:
        console.emit("model", meant=trained, run_id=trained_run.run_id)
    destination = Output(output, like_input, spreadsheet, replace)
    with files.telling():
        rows = prediction_data(files.file.data, data, trained_run.state, query)
        limits, alone = files.file.predict, None
        if files.is_active:
            destination.check(rows)
            if limits.alone is not None:
                own = Path(limits.alone)
                alone = Alone.load(own, trained_run, name, files.file.data, data, query)
    with join_ranks(files.device, files.recipe.run.step_timeout_s) as ranks:
        predicted, folder = PartyApp(files, console, wait_s, ranks=ranks).predict(
            trained_run, rows, destination, deadline_s=deadline_s or limits.deadline_s, alone=alone
        )
    result: dict[str, Any] = {"output": str(output)} if files.is_active else {}
    scorings.note(
        Path(files.file.out),
        party=name,
        recipe=trained_run.recipe.name,
        model=trained_run.run_id,
        run=folder.run_id if folder is not None else "",
        rows=predicted.rows,
        scored=predicted.written,
        data=str(folder.facts().get("data", "")) if folder is not None else "",
        output=str(output.absolute()) if files.is_active else "",
    )
    facts = {key: value for key, value in asdict(predicted).items() if value != ""}
    console.emit("predicted", **facts, **result, said=str(predicted))
    if files.is_active and files.file.data is not None:
        labels = Labels.from_state(trained_run.state["labels"])
        # Class names are shown to the person, but not logged.
        console.show("scores", said=meaning(labels, label_name(files.file.data)))
    if folder is None:
        return NO_JOINT_SCORE
    do_last(folder.prepare_finished_note())
    console.emit("completed", run_id=folder.run_id, folder=str(folder.path))
    return 0


def _predict_solo(
    party: Path,
    run: Path,
    data: str | None,
    query: str | None,
    destination: Any,
    device: str | None,
) -> int:
    """Scores the active party's rows with its student, without server and passive parties."""
    from vfl_common import scorings
    from vfl_party.assembly.files import read_files
    from vfl_party.predict.prediction import Alone
    from vfl_party.predict.run import load_solo, prediction_data, unseen

    name = load_party(party).name
    trained = load_solo(run, name)
    files = read_files(party, device=device, recipe=trained.recipe)
    rows = prediction_data(files.file.data, data, trained.state, query)
    destination.check(rows)
    alone = Alone.open_for(trained, name, rows)
    console = Console("vfl-party")
    for text in unseen(trained, alone.opened.table):
        console.show("unseen", said=f"{alone.opened.table.source}: {text}")
    result = alone.write([destination], files.device)
    scorings.note(
        Path(files.file.out),
        party=name,
        recipe=trained.recipe.name,
        model=trained.run_id,
        run="",
        rows=result.rows,
        scored=result.written,
        output=str(destination.path.absolute()),
    )
    facts = {key: value for key, value in asdict(result).items() if value != ""}
    console.emit("predicted", **facts, output=str(destination.path), said=str(result))
    console.show("scores", said=alone.meaning(files.file.data or rows))
    return 0


@cli.command(epilog=EXIT_CODES)
@click.argument("party", type=click.Path(path_type=Path))
@click.argument("cells", metavar="ID...", nargs=-1, required=True)
@click.option(
    "--run",
    "trained",
    metavar="RUN",
    help="Search this run: an id, a folder, production, or latest.",
)
@click.option("--all", "all_runs", is_flag=True, help="Search all of this party's runs.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and change nothing.")
def forget(
    party: Path, cells: tuple[str, ...], trained: str | None, all_runs: bool, dry_run: bool
) -> None:
    """Remove one person from the runs of PARTY.

    The command finds the data of the person in the runs, removes what can be removed, and reports
    which models must be trained again. ID is the id in the party's own table, or any spelling that
    the run's id rules make the same. With several id columns, give a value for each. The person's
    rows are removed from the predictions in the run folders, and from the samples of fuzzy
    linkages. Checkpoints contain no id, but weights depend on every training row. So a model that
    was trained with the row must be trained again, after the row was removed from the table. Run
    this command before you remove the row: only the table of the training shows for certain how the
    row was used. Once the table has changed, the party's record shows whether a run had the row.
    Files that vfl-party predict wrote elsewhere are listed, but not changed. If neither the table
    nor a run has the id, the exit code is 2. Every party must run the command for itself.

    \b
    Examples:
      vfl-party forget bank.toml K-1017 --all --dry-run
      vfl-party forget bank.toml K-1017 --all
    """
    from vfl_common.run_folder import RunFolder
    from vfl_party.assembly.files import read_files
    from vfl_party.predict.forget import absent, clear_sample, outputs, person, trace
    from vfl_party.record.book import folder_of

    if (trained is None) == (not all_runs):
        raise InputError(
            Code.CONFIG_INVALID,
            "forget: needs exactly one of --run and --all. Set --run RUN or --all.",
        )
    files = read_files(party)
    out, name = Path(files.file.out), files.name
    record = folder_of(Path(files.file.record.folder or out), name)
    person_ids, source = person(cells, files.data, record), hide_passwords(files.data.source)
    folders = (
        [path.parent for path in sorted(out.glob(f"*/{name}/run.json"))]
        if trained is None
        else [_find_run_folder(trained, files.file) / name]
    )
    if trained is not None and not (folders[0] / "run.json").is_file():
        raise InputError(
            Code.FILE_INVALID,
            f"{folders[0].parent}: contains no run of {name}. Set --run to {out}/RUN-ID, or use "
            "--all.",
        )
    is_in_table, is_known = person_ids.in_table(None), False
    for path in folders:
        folder = RunFolder(path, path.parent.name)
        if folder.facts().get("job") == "train":
            traces = trace(folder, name, person_ids, remove=not dry_run)
            is_in_table, is_known = is_in_table or not traces.lacks_it, is_known or traces.has_row
            click.echo(traces.verdict)
            held = [*traces.held]
        elif held := clear_sample(folder, person_ids, remove=not dry_run):
            is_known = True
            click.echo(f"{folder.run_id}: linked the row for a prediction")
        for trace_item in held:
            text = clean(str(trace_item), LINE)
            click.echo(f"  {text.replace('; removed', '; would be removed') if dry_run else text}")
    for trace_item in outputs(out, name, person_ids):
        is_known = True
        click.echo(clean(str(trace_item), LINE))
    if is_in_table:
        click.echo(f"{source}: remove the row there, or the next run has it again")
    elif is_known:
        click.echo(absent(source))
    else:
        raise InputError(
            Code.DATA_INVALID,
            f"forget: {absent(source)}, and no run or prediction of {name} contains it. Check the "
            "spelling of the id.",
        )


@cli.command(epilog=EXIT_CODES)
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--rows",
    type=click.IntRange(1, 100_000_000),
    help="Set the number of common rows instead of reading the data.",
)
@click.option(
    "--rounds",
    "ended",
    multiple=True,
    metavar="PHASE=N",
    help="Count N rounds for a phase with early stopping.",
)
def forecast(plan: Path, rows: int | None, ended: tuple[str, ...]) -> None:
    """Count the bytes of a run as one JSON line.

    `vfl forecast` prints the same numbers as a table. PLAN is a recipe or a party file. Nothing is
    sent, and no certificate is needed.
    """
    from vfl_party.forecast.count import forecast as count
    from vfl_party.forecast.count import read_outlook, read_rounds

    outlook = read_outlook(plan)
    with name_file_in_errors(outlook.file):
        result = count(outlook, rows, read_rounds(ended))
    click.echo(to_json({"event": "forecast", **result.model_dump(mode="json")}, compact=True))


@cli.command(epilog=EXIT_CODES)
@click.argument("party", type=click.Path(path_type=Path))
@click.option(
    "--wait",
    "wait_s",
    default=3.0,
    show_default=True,
    help="Wait at most this many seconds for the answer.",
)
def health(party: Path, wait_s: float) -> None:
    """Ask whether the active party of PARTY is running and serving.

    The active party must be on this machine (grpc.health.v1). The exit code is 0 if it serves. The
    call uses the party's own certificate. Use it for the health check of a container or supervisor.
    A passive party does not listen, so it has no health check.

    \b
    Example: vfl-party health bank.toml
    """
    from vfl_common.identity.credentials import collect_members, load_credentials
    from vfl_common.rpc.health import require_serving

    file = load_party(party)
    recipe = load_recipe(Path(file.recipe))
    place = recipe.party(file.name)
    if place is None or place.role != "active" or file.listen.endswith(":0"):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{party}: listen: only an active party with a fixed port answers health checks (got "
            f"{file.name}). Set `listen`, or ask the active party.",
        )
    members = collect_members(recipe, pins=file.pins)
    address = require_serving(
        file.listen, load_credentials(file.tls, name=file.name, members=members), wait_s
    )
    click.echo(f"{file.name} at {address} serves")


def _find_run_folder(text: str, file: PartyFile) -> Path:
    """Returns the folder of the run that an option names: a path, an id, ``latest`` or
    ``production``. The last two refer to this party's runs of the recipe. Raises InputError.
    """
    from vfl_common.registry import WORDS, ModelRegistry

    recipe = load_recipe(Path(file.recipe)).name if text in WORDS else ""
    return ModelRegistry(Path(file.out), file.name).folder(text, recipe)


def _break_line(head: str, text: str) -> str:
    """Returns ``head`` followed by ``text``. Breaks a line that is too long, but only after
    semicolons.
    """
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 0)).columns)
    first_item, *items = text.split("; ")
    lines = [head + first_item]
    for item in items:
        if len(f"{lines[-1]}; {item};") > width:
            lines[-1] += ";"
            lines.append(" " * len(head) + item)
        else:
            lines[-1] += f"; {item}"
    return "\n".join(lines)


def _load_reporters() -> list[Callable[[Path], list[Path]]]:
    """Loads the entry points of the group ``vfl.reports``, which draw the charts of a run. Raises
    InputError if there are none.
    """
    reporters: list[Callable[[Path], list[Path]]] = [
        entry.load() for entry in entry_points(group="vfl.reports")
    ]
    if not reporters:
        raise InputError(
            Code.CONFIG_INVALID,
            "--report: no installed package draws reports (entry points of the group vfl.reports). "
            "Install vfl as its README says.",
        )
    return reporters


def main() -> None:
    """Runs ``vfl-party``."""
    run_program(cli, "vfl-party", private=True)


# torchrun starts this module with ``python -m vfl_party.cli``.
if __name__ == "__main__":
    main()
