"""``vfl-party check``: reports everything that can be found wrong before training, one line
each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from vfl_common.config.data import DataSettings
from vfl_common.config.party import PartyFile, load_party
from vfl_common.config.recipe import Recipe, load_recipe, name_file_in_errors
from vfl_common.config.task import CLASSES
from vfl_common.errors import Code, InputError, VflError
from vfl_common.identity.credentials import (
    BOTH,
    DIALS,
    Credentials,
    collect_members,
    load_credentials,
    warn_if_ending,
)
from vfl_common.rpc.ask import ask
from vfl_common.rpc.channel import check_address
from vfl_common.rpc.exchange.service import SERVICE as EXCHANGE
from vfl_common.rpc.messages import EMPTY_MESSAGES, PARTY_MESSAGES, Joining
from vfl_common.rpc.uplink import SERVICE as SESSIONS
from vfl_common.summary import describe_label_exposure, describe_linkage_exposure
from vfl_common.text import format_percent
from vfl_party.align import make_alignment
from vfl_party.align.psi import PsiAlignment
from vfl_party.assembly.files import PartyFiles, read_files
from vfl_party.assembly.machine import room, serve_ports
from vfl_party.assembly.party import Assembled, OpenedParty, assemble
from vfl_party.base.devices import resolve_device
from vfl_party.data import Table, describe, read_rows, tabulate
from vfl_party.data.id_rules import about_zeros, choices, describe_keys, normalize_ids
from vfl_party.data.ids import Ids
from vfl_party.data.notes import find_smells, find_target_leakage
from vfl_party.phases.advice import warn_few_rows
from vfl_party.phases.course import Course
from vfl_party.policy.guards import describe_policy, make_check_guards, words_of
from vfl_party.predict.prediction import plan_exchanges
from vfl_party.predict.results import count_formula_cells, label_name
from vfl_party.runtime import versions
from vfl_party.runtime.joining import check_before, joining_of, prepare_training

_CONNECT_S = 3.0
# The end of a line from ``choices`` about ids that ``tabulate`` will refuse with a reason.
_REFUSED = ": refused"
# The part of a line from ``choices`` that shows that a rule changes no id.
_ALL_KEPT = ": 0 missing, 0 repeat "
# The end of the description of a categorical column.
_CATEGORIES = " categories"
# The subjects of errors that concern neither the data nor the recipe.
_ABOUT = {Code.MODEL_INVALID: "model", Code.REFUSED: "policy"}


# The verdicts, the most important first.
VERDICTS = ("FAIL", "SOON", "note", "ok")


@dataclass(frozen=True)
class Finding:
    """One line of the report: the subject, whether it is fine, and the finding or the fix.

    ``soon``: Whether it will soon stop being fine. ``note``: Whether it can run but is perhaps not
    intended. ``detail``: Whether it is shown only with --verbose, because it is the same for every
    recipe, or about one of many columns, or about an unused id rule.
    """

    about: str
    fine: bool
    text: str
    soon: bool = False
    note: bool = False
    detail: bool = False

    @property
    def verdict(self) -> str:
        """The first word of the line, one of ``VERDICTS``."""
        fail, soon, note, fine = VERDICTS
        return fail if not self.fine else soon if self.soon else note if self.note else fine


def check(path: Path, device: str | None, *, offline: bool) -> Iterator[Finding]:
    """Yields all findings about a party file, in the order in which a run would meet them.
    ``offline``: Whether to contact no peer.
    """
    about = "party file"
    try:
        file = load_party(path)
        yield Finding(about, True, f"{path}: {file.name}")
        about = "recipe"
        recipe = load_recipe(Path(file.recipe))
        yield Finding(
            about, True, f"{recipe.name}, digest {recipe.digest()} (the same at every party)"
        )
    except VflError as error:
        yield Finding(about, False, str(error))
        return
    findings: list[Finding] = []
    checks: list[tuple[str, Callable[[], str]]] = [
        (
            "certificate",
            lambda: f"for {file.name}, valid until {_load_credentials(file, recipe).not_after}",
        ),
        ("disk", lambda: room(file)),
        ("device", lambda: f"{resolve_device(device or file.device)}"),
        ("phases", lambda: _list_phases(recipe)),
    ]
    for about, run_check in checks:
        try:
            with name_file_in_errors(Path(file.recipe)):
                findings.append(Finding(about, True, run_check()))
        except VflError as error:
            findings.append(Finding(about, False, str(error)))
    yield from findings
    yield from _find_expiring(lambda: _load_credentials(file, recipe))
    if not all(finding.fine for finding in findings):
        return
    try:
        with name_file_in_errors(Path(file.recipe)):
            files = read_files(path, device=device)
    except VflError as error:
        about = "recipe" if str(error).startswith(f"{file.recipe}: ") else "party file"
        yield Finding(about, False, str(error))
        return
    yield Finding("role", True, files.settings.role)
    for line in describe_policy(file.policy):
        yield Finding("policy", True, line, note="policy" not in file.model_fields_set)
    plugins: dict[str, str] = {}
    yield from _check_data(files, plugins)
    yield from _check_network(files, offline, plugins)


def _list_phases(recipe: Recipe) -> str:
    """Returns the names of the phases. Raises InputError if the settings of a phase are wrong, or
    if the phases do not fit together.
    """
    course = Course(recipe)
    names = [phase.name for phase in course.phases if phase.settings]
    course.check()
    return ", ".join(names)


def _load_credentials(file: PartyFile, recipe: Recipe) -> Credentials:
    """Reads the party's credentials. Raises InputError if they cannot be used, or if a pin names an
    unknown party.
    """
    uses = BOTH if file.name == recipe.active.name else DIALS
    return load_credentials(
        file.tls, name=file.name, members=collect_members(recipe, pins=file.pins), uses=uses
    )


def _find_expiring(load: Callable[[], Credentials]) -> Iterator[Finding]:
    """Yields a finding for each certificate that expires soon. Yields nothing if the credentials
    cannot be used, which another finding reports.
    """
    with contextlib.suppress(VflError):
        credentials, now = load(), datetime.now(UTC)
        for about, path, certificate in (
            ("certificate", credentials.certificate_file, credentials.certificate),
            ("CA", credentials.ca_file, credentials.authority),
        ):
            text = warn_if_ending(certificate, now)
            if text:
                yield Finding(about, True, f"{path} {text}", soon=True)


def _check_data(files: PartyFiles, plugins: dict[str, str]) -> Iterator[Finding]:
    """Assembles the party as for a run, and yields the findings about its data, rows, models and
    phases.

    ``plugins``: The dict into which names and versions of the plug-ins that other parties need too
    are written.
    """
    path = Path(files.file.recipe)
    ids: list[str] = []
    notes: list[Finding] = []
    refused = False

    def load(data: DataSettings, with_label: bool) -> Table:
        rows = read_rows(data, with_label)
        # Only the first table, which contains the rows to align, is examined.
        if data.id and not rows.numbered and not ids:
            zeros = ""
            if data.key_columns is not None:
                ids.extend(describe_keys(rows.ids, data.key_columns, files.recipe.rows.key_names))
            else:
                ids.extend(choices(rows.ids, data.id_rules or (), data.duplicates))
                normalized = normalize_ids(rows.ids, data.id_rules or ())
                zeros = about_zeros(Ids(normalized.drop_null()), data.id_rules or ())
            notes.extend(Finding("ids", True, text, note=True) for text in [zeros] if text)
        notes.extend(Finding("guessed", True, text, note=True) for text in rows.notes)
        smells = list(find_smells(rows, data))
        if with_label and files.recipe.task.kind in CLASSES:
            smells += find_target_leakage(rows, label_name(data))
        notes.extend(Finding("data", True, smell.text, note=True) for smell in smells)
        computed = sum(
            map(
                count_formula_cells,
                (*rows.ids, *([rows.labels] if rows.labels is not None else [])),
            )
        )
        if with_label and computed:
            text = (
                f"{computed:,} ids and labels begin with =, +, -, @ or a tab, and a "
                "spreadsheet evaluates them in a .csv"
            )
            notes.append(
                Finding(
                    "data",
                    True,
                    f"{text} of predictions; see vfl-party predict --spreadsheet",
                    note=True,
                )
            )
        table = tabulate(rows, data, with_label)
        # Further notes, such as a query without an order, arise when rows are selected.
        rest = [text for text in table.notes if text not in rows.notes]
        notes.extend(Finding("guessed", True, text, note=True) for text in rest)
        return table

    try:
        try:
            opened = files.open(load)
        finally:
            # The lines about ids are shown even if an id is refused.
            refused = bool(ids) and ids[-1].endswith(_REFUSED)
            yield from notes
            for line in ids[: len(ids) - refused]:
                yield Finding("ids", True, line, detail=_ALL_KEPT in line)
        for line in describe(opened.table):
            yield Finding("data", True, line, detail=line.endswith(_CATEGORIES))
        counts = opened.table.counts
        if counts is not None and counts.unlabelled:
            text = f"{counts.unlabelled:,} of {counts.rows:,} rows have no label: training leaves"
            yield Finding("data", True, f"{text} them out, and they can be predicted")
        if opened.advice:
            yield Finding("data", True, opened.advice, note=True)
        plugins |= versions.get_shared_versions(opened)
        yield from _find_plugins(opened, plugins)
        with name_file_in_errors(path):
            yield from _check_assembly(files, opened)
    except VflError as error:
        about = "recipe" if str(error).startswith(f"{path}: ") else _ABOUT.get(error.code, "data")
        yield Finding("ids" if refused else about, False, str(error))


def _find_plugins(opened: OpenedParty, shared: Mapping[str, str]) -> Iterator[Finding]:
    """Yields a finding with name and version for each plug-in that the party needs."""
    for name, version in shared.items():
        yield Finding(
            "plug-in", True, f"{name}: {version} (the same version at every party that needs it)"
        )
    for name, version in (
        versions.get_model_versions(opened) | versions.get_reader_versions(opened)
    ).items():
        if name not in shared:
            yield Finding("plug-in", True, f"{name}: {version} (this party's own)")


def _check_assembly(files: PartyFiles, opened: OpenedParty) -> Iterator[Finding]:
    """Yields findings about the rows, the models, the phases and the data that the party sends.
    Raises InputError.
    """
    opened = replace(opened, work=prepare_training(files.recipe, files.name, Path(files.file.out)))
    alignment = make_alignment(files.recipe)
    party = assemble(
        opened,
        alignment.get_expected(opened.table),
        policy=files.policy(),
        trees=files.file.trees,
    )
    installed = make_check_guards(files)
    plan = check_before([words_of(files.file, files.recipe), *installed], party).plan
    sizes = _describe_splits({split: len(rows) for split, rows in party.prepared.splits.items()})
    learns_division = files.recipe.rows.split in ("column", "grouped") and not files.is_active
    if learns_division:
        sizes = (
            f"{len(opened.table)}; the active party's column determines the splits (this check: "
            "models "
            f"as with {sizes})"
        )
    own_rows = files.recipe.rows.align == "none" and bool(files.recipe.passives)
    if own_rows and files.is_active:
        sizes = (
            f"{len(opened.table)} ids with labels; each passive party has other rows and "
            "divides them"
        )
    earlier_count = alignment.count_earlier(Path(files.file.out), files.name, opened.table)
    if earlier_count is not None:
        shares = (
            f"{earlier_count} of {len(opened.table)} "
            f"({format_percent(earlier_count, len(opened.table))}) are common"
        )
        yield Finding("rows", True, f"{shares}, as run {files.recipe.rows.alignment} found")
        sizes = f"at most {sizes}: the run divides only the common rows"
    elif not alignment.certain and files.recipe.passives:
        sizes = (
            f"at most {sizes}: the rows that all parties have, which are found at the start "
            "of the run"
        )
    yield Finding("rows", True, sizes)
    if isinstance(alignment, PsiAlignment) and files.recipe.passives:
        yield Finding("alignment", True, f"by {alignment.describe()}")
    if linkage := describe_linkage_exposure(party.exchanges):
        yield Finding("alignment", True, linkage, note=True)
    few_rows_text = warn_few_rows(len(party.prepared.splits["train"]), _count_classes(party))
    if few_rows_text and not own_rows and not learns_division:
        yield Finding("training", True, few_rows_text, note=True)
    if files.recipe.start is not None:
        yield Finding("start", True, f"the encoder of run {files.recipe.start.run}")
    for name, model in party.party.models.items():
        count = sum(parameter.numel() for parameter in model.parameters())
        # Trees have no parameters before training.
        size = f"{count:,} parameters" if count else "no parameters before training"
        yield Finding("model", True, f"{name}: {size}")
    if files.file.init == "recipe":
        reason = (
            "every party can compute the initial weights, and could infer columns with them. "
            "Use it for runs "
            "that you compare"
        )
        yield Finding("model", True, f'init = "recipe": {reason}', note=True)
    rounds = ", ".join(f"{phase.name} ({phase.rounds})" for phase in party.phases)
    yield Finding("rounds", True, rounds)
    for guard in installed:
        for about, text in guard.findings(opened):
            yield Finding(about, True, text)
    for message in party.leaves:
        description = (
            f"{message.carries} to {message.receiver}, {message.when}; chain: {message.chain}"
        )
        yield Finding("leaves", True, f"{message.phase}: {message.exchange}: {description}")
    if files.is_active and (statement := describe_label_exposure(party.exchanges)):
        yield Finding("labels", True, statement)
    for peer, numbers in plan.numbers.items() if plan is not None else ():
        text = f"{peer} would get {numbers:,} numbers about one person, as phases declare it"
        yield Finding("leaves", True, text)
    for message in plan_exchanges(party.party):
        description = (
            f"{message.carries} to {message.receiver}, {message.when}; chain: {message.chain}"
        )
        yield Finding("leaves", True, f"each prediction: {message.exchange}: {description}")
    for name, fields in PARTY_MESSAGES.items():
        content = "; ".join(fields.values()) or f"no content ({EMPTY_MESSAGES[name]})"
        text = f"session with {files.recipe.server}: {name}: {content}"
        yield Finding("leaves", True, text, detail=True)


def _count_classes(party: Assembled) -> int:
    """Returns the number of classes, as far as this party knows; 0 for a regression."""
    task, labels = party.party.recipe.task, party.prepared.labels
    return (
        len(labels.classes) if labels is not None else task.classes or 2 * (task.kind == "binary")
    )


def _describe_splits(sizes: dict[str, int]) -> str:
    """Describes the sizes of the splits. Lists ``aligned`` and ``local`` only if they are larger
    than the smaller sets.
    """
    parts = [f"{sizes[split]} {split}" for split in ("test", "validation", "train")]
    if sizes["aligned"] > sizes["train"]:
        parts.append(f"{sizes['aligned']} aligned (for training, with or without labels)")
    if sizes["local"] > sizes["aligned"]:
        parts.append(f"{sizes['local']} local (for training, aligned or this party's alone)")
    return ", ".join(parts)


def _check_network(
    files: PartyFiles, offline: bool, plugins: Mapping[str, str]
) -> Iterator[Finding]:
    if files.is_active:
        try:
            check_address(files.file.listen)
            advertised = f" at {files.file.advertise}" if files.file.advertise is not None else ""
            reach_text = (
                f"; passive parties must be able to reach it{advertised}"
                if files.recipe.passives
                else ""
            )
            yield Finding("listen", True, f"{files.file.listen} is free{reach_text}")
        except VflError as error:
            yield Finding("listen", False, str(error))
        for text, is_free in serve_ports(files.file):
            yield Finding("serve", True, text, note=not is_free)
    if offline:
        return
    try:
        joining = joining_of(files.course, files.settings.role, plugins)
    except VflError:
        # The recipe's error is reported above. Without a valid recipe, no peer can be asked.
        return
    yield _ask_peer("server", files.file.server, files.recipe.server, SESSIONS, files, joining)
    if not files.is_active:
        if files.file.active is None:
            yield Finding(
                "active party",
                True,
                "not tried, because its address comes from the server when the run starts; set "
                "active to try it",
                note=True,
            )
        else:
            yield _ask_peer(
                "active party",
                files.file.active,
                files.recipe.active.name,
                EXCHANGE,
                files,
                joining,
            )


def _ask_peer(
    about: str, address: str, peer: str, service: str, files: PartyFiles, joining: Joining
) -> Finding:
    """Asks a peer whether it would accept this party. The peer compares recipe, protocol and
    plug-ins.
    """
    try:
        has_compared = ask(address, files.keyring.current(), peer, service, joining, _CONNECT_S)
    except VflError as error:
        return Finding(about, False, str(error))
    return Finding(
        about,
        True,
        f"{peer} answers at {address}, certificates accepted; same recipe, protocol and plug-ins"
        if has_compared
        else f"{peer} answers at {address}, certificates accepted; it has an older release: "
        "recipe and protocol are compared only when the run starts",
        note=not has_compared,
    )


def require_ready(findings: list[Finding]) -> None:
    """Raises InputError if ``findings`` contains a problem."""
    problems = [finding.about for finding in findings if not finding.fine]
    if problems:
        raise InputError(
            Code.CONFIG_INVALID,
            f"not ready: {', '.join(problems)}. Correct the problems reported above.",
        )
