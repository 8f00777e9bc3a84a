"""Describes to a person, before a grant is signed, what the party would send.

The description has the receivers, the number of people, the defences, and measured leaks of such
exchanges.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from vfl_common.bundle import Kind
from vfl_common.errors import InputError
from vfl_common.psi import PHASE
from vfl_common.run_folder import RunFolder
from vfl_common.summary import ARROW, ExchangeSummary
from vfl_common.text import align_columns, count, list_names
from vfl_governance.account.limits import Balance, make_check_guard
from vfl_governance.grants.store import Grant
from vfl_party.assembly.files import PartyFiles
from vfl_party.assembly.party import Assembled, OpenedParty, assemble, expect_rows
from vfl_party.forecast.count import forecast_of
from vfl_party.forecast.result import CountedForecast
from vfl_party.outbound.chains import PASSIVES
from vfl_party.phases.context import find_privacy
from vfl_party.policy.meeting import plan_sent
from vfl_party.predict.prediction import PHASE as PREDICT
from vfl_party.predict.prediction import plan_exchanges

_HEAD = ("phase", "to", "kind", "people", "bundles", "bytes", "carries", "defences")
_RIGHT = frozenset({"people", "bundles", "bytes"})
# The separator between several exchanges of the same kind with one peer.
_JOINED = "; "
_PAGES = "docs"
# Matches the shape of a tensor that has a value for each row.
_ROW_SHAPE = re.compile(r"\[(rows|own|packed|up|down|tags|bits)\b")


@dataclass(frozen=True)
class Leaving:
    """The bundles of one kind that one peer would get in a phase.

    Args:
        phase: The name of the phase.
        phase_kind: The kind of the phase.
        to: The peer.
        kind: The kind of bundle.
        people: The maximum number of rows with values of their own. 0 for aggregates. None if it is
            unknown before the run.
        bundles: The maximum number of bundles in a run, or None if it is unknown.
        payload_bytes: The maximum number of bytes in a run, or None if it is unknown.
        carries: The contents of the bundles in words.
        defences: The chains of transforms in words.
    """

    phase: str
    phase_kind: str
    to: str
    kind: str
    people: int | None
    bundles: int | None
    payload_bytes: int | None
    carries: str
    defences: str

    @property
    def transforms(self) -> tuple[str, ...]:
        """The names of the transforms: the steps of the chains before the policy and the codec."""
        chains = (chain_text.split(ARROW)[:-2] for chain_text in self.defences.split(_JOINED))
        return tuple(dict.fromkeys(step for chain in chains for step in chain))

    @property
    def lines(self) -> Iterator[tuple[str, ...]]:
        """The cells of a table: one line, and one more line for each further content."""
        numbers = (self.people, self.bundles, self.payload_bytes)
        number_cells = ("?" if number is None else f"{number:,}" for number in numbers)
        start: tuple[str, ...] = (self.phase, self.to, self.kind, *number_cells)
        cells = (self.carries.split(_JOINED), self.defences.split(_JOINED))
        for last_cells in zip_longest(*cells, fillvalue=""):
            yield (*start, *last_cells)
            start = ("",) * len(start)


@dataclass(frozen=True)
class GrantOutlook:
    """What a party would send under a recipe.

    Args:
        role: The role of the party.
        rows: The number of rows in its table.
        leaves: What it would send in a training run.
        of_prediction: What it would send about predicted rows.
        numbers: {peer: maximum count of numbers about one person in a run}, as far as known.
        balances: The limits of the account, with the amounts before and after.
        privacy: A sentence about differential privacy, or ''.
        uncounted: The reason why the bytes are not known, or ''.
    """

    role: str
    rows: int
    leaves: tuple[Leaving, ...]
    of_prediction: tuple[Leaving, ...]
    numbers: Mapping[str, int]
    balances: tuple[Balance, ...] = ()
    privacy: str = ""
    uncounted: str = ""

    @property
    def payload_bytes(self) -> int:
        """The number of bytes that the party would send in a run, as far as known."""
        return sum(exchange.payload_bytes or 0 for exchange in self.leaves)


def look(
    files: PartyFiles, runs: int = 1, predictions: int = 0
) -> tuple[OpenedParty, GrantOutlook]:
    """Assembles the party as for a run, and counts what it would send.

    ``runs`` and ``predictions`` are those of the grant. Raises InputError if the files are invalid,
    or if the party's policy forbids what the recipe needs.
    """
    opened = files.open()
    assembled = assemble(opened, expect_rows(opened), policy=files.policy(), trees=files.file.trees)
    counted, uncounted = _count_bytes(files, assembled)
    plan = (
        plan_sent(assembled.party, len(assembled.prepared.table)) if counted is not None else None
    )
    private = find_privacy(assembled.party)
    leaves = tuple(_list_leaving(files, assembled, counted))
    of_prediction = tuple(
        _describe_uncounted(files, item, len(opened.table), PREDICT)
        for item in plan_exchanges(assembled.party)
    )
    statement = private.report().statement if private is not None else ""
    numbers = dict(plan.numbers) if plan is not None else {}
    guard = make_check_guard(files)
    balances = (
        tuple(guard.balances(opened, assembled.party, runs, predictions))
        if guard is not None
        else ()
    )
    outlook_fields = (leaves, of_prediction, numbers, balances, statement, uncounted)
    return opened, GrantOutlook(files.settings.role, len(opened.table), *outlook_fields)


def _count_bytes(files: PartyFiles, assembled: Assembled) -> tuple[CountedForecast | None, str]:
    """Returns the forecast of bytes, or None and the reason why there is none."""
    if files.recipe.rows.align == "none" and files.is_active and files.recipe.passives:
        return None, "only the other parties know how many rows they have"
    try:
        return forecast_of(assembled.party, len(assembled.prepared.table)), ""
    except InputError as error:
        return None, str(error)


def _list_leaving(
    files: PartyFiles, assembled: Assembled, counted: CountedForecast | None
) -> Iterator[Leaving]:
    """Yields what the party would send, in the order of the phases."""
    rows, kinds = len(assembled.prepared.table), _kinds_of_phases(files)
    if counted is None:
        for exchange in assembled.leaves:
            yield _describe_uncounted(
                files, exchange, rows, kinds.get(exchange.phase, exchange.phase)
            )
        return
    for link in counted.links:
        if link.sender != files.name or not link.messages:
            continue
        exchanges = [
            exchange
            for exchange in assembled.leaves
            if _matches_link(exchange, link.phase, link.receiver, link.kind)
        ]
        # The messages of this link are only acknowledgements.
        if not exchanges:
            continue
        about_rows = any(_has_row_values(exchange, link.kind) for exchange in exchanges)
        yield Leaving(
            link.phase,
            kinds.get(link.phase, link.phase),
            link.receiver,
            link.kind,
            rows if about_rows else 0,
            link.messages,
            link.payload_bytes,
            _JOINED.join(dict.fromkeys(exchange.carries for exchange in exchanges)),
            _JOINED.join(dict.fromkeys(exchange.chain for exchange in exchanges)),
        )


def _kinds_of_phases(files: PartyFiles) -> Mapping[str, str]:
    return {phase.name: phase.kind for phase in files.course.phases}


def _matches_link(exchange: ExchangeSummary, phase: str, receiver: str, kind: str) -> bool:
    return (
        exchange.phase == phase
        and exchange.receiver in (receiver, PASSIVES)
        and _kind_of_exchange(exchange) == kind
    )


def _kind_of_exchange(exchange: ExchangeSummary) -> str:
    """Returns the kind of the values in an exchange, which is the first word of ``sent``."""
    return exchange.sent.partition(" ")[0].rstrip(":")


def _has_row_values(exchange: ExchangeSummary, kind: str) -> bool:
    """Returns whether an exchange sends values for each row.

    If the shapes are unknown, it assumes so for all kinds except weights.
    """
    return bool(_ROW_SHAPE.search(exchange.sent)) or (
        f"{kind}: " in exchange.sent and kind != "weights"
    )


def _describe_uncounted(
    files: PartyFiles, exchange: ExchangeSummary, rows: int, phase_kind: str
) -> Leaving:
    """Returns what is known about an exchange whose bytes are unknown."""
    _ = files
    kind = _kind_of_exchange(exchange)
    people = rows if _has_row_values(exchange, kind) else 0
    if phase_kind == PREDICT:
        people = 1 if people else 0
    return Leaving(
        exchange.phase,
        phase_kind,
        exchange.receiver,
        kind,
        people,
        None,
        None,
        exchange.carries,
        exchange.chain,
    )


def describe(grant: Grant, files: PartyFiles, outlook: GrantOutlook) -> Iterator[str]:
    """Yields the lines that a person reads before signing."""
    yield f"{grant.party} would allow: {grant}"
    yield f"recipe: {grant.recipe}, digest {grant.digest}, phases {', '.join(grant.phases)}"
    yield f"table: {outlook.rows:,} people; the run may use all of them"
    for name, pin in grant.peers.items():
        yield f"to: {name}, key {pin}"
    if grant.runs:
        yield ""
        size = f", at most {outlook.payload_bytes:,} bytes in all" if not outlook.uncounted else ""
        yield f"in each run this party would send{size}:"
        yield from _render_table(outlook.leaves)
        for peer, maximum in outlook.numbers.items():
            yield f"about one person {peer} would get at most {count(maximum, 'number')} in a run"
        if outlook.uncounted:
            yield f"bytes are not counted: {outlook.uncounted}"
    if grant.predictions:
        yield ""
        yield f"this party would send for each of at most {grant.predictions:,} predicted rows:"
        nothing = ["only the ids that it asks for"]
        yield from _render_table(outlook.of_prediction) if outlook.of_prediction else nothing
    yield ""
    yield "on public data, attacks on such exchanges revealed at least:"
    yield from _describe_measurements(outlook, grant)
    yield ""
    yield from _describe_spending(grant, outlook, files)


def _render_table(leaves: Sequence[Leaving]) -> list[str]:
    return align_columns([_HEAD, *(line for exchange in leaves for line in exchange.lines)], _RIGHT)


def _describe_measurements(outlook: GrantOutlook, grant: Grant) -> Iterator[str]:
    all_exchanges = [
        *(outlook.leaves if grant.runs else ()),
        *(outlook.of_prediction if grant.predictions else ()),
    ]
    exchanges_by_line: dict[str, list[str]] = {}
    for exchange in all_exchanges:
        measured = get_measurement(
            exchange.phase_kind, outlook.role, exchange.kind, exchange.carries
        )
        line = NOTHING
        if measured is not None:
            line = f"{measured.describe(exchange.transforms)} ({_PAGES}/{measured.page})"
        # Other rows of the same phase go to other parties.
        to = f" to {exchange.to}" if measured is not None and measured.tensors else ""
        exchanges_by_line.setdefault(line, []).append(f"{exchange.phase} {exchange.kind}{to}")
    for line, exchanges in exchanges_by_line.items():
        yield f"  {', '.join(dict.fromkeys(exchanges))}: {line}"


def _describe_spending(grant: Grant, outlook: GrantOutlook, files: PartyFiles) -> Iterator[str]:
    """Yields sentences about the amounts that the grant would spend."""
    runs, rows = count(grant.runs, "run"), count(grant.predictions, "predicted row")
    size = (
        f" of {grant.runs * outlook.payload_bytes:,} bytes in all" if not outlook.uncounted else ""
    )
    parts = ([runs + size] if grant.runs else []) + ([rows] if grant.predictions else [])
    yield f"it would spend at most: {', '.join(parts)}"
    for balance in outlook.balances:
        yield balance.words(grant.runs, grant.predictions)
    earlier_runs = len(_find_earlier_runs(files))
    yield f"{files.name} has taken part in {count(earlier_runs, 'run')} of this recipe before"
    if outlook.privacy:
        yield f"differential privacy in one run: {outlook.privacy}"
    elif grant.runs:
        yield (
            "differential privacy: the recipe does not train with dp, so nothing bounds all that a "
            "run reveals; vfl-party account adds up the noise on messages"
        )


def _find_earlier_runs(files: PartyFiles) -> list[Path]:
    """Returns the folders of the party's earlier training runs of the recipe."""
    folders, digest = [], files.recipe.digest()
    for path in Path(files.file.out).glob(f"*/{files.name}/run.json"):
        try:
            facts = RunFolder(path.parent, path.parent.parent.name).facts()
        except InputError:
            continue
        if facts.get("recipe_digest") == digest and facts.get("job") == "train":
            folders.append(path.parent)
    return folders


NOTHING = "no leaks were measured for such an exchange; measure them in a rehearsal with vfl leaks"


# The kinds of phases that send the embedding of a row only once.
ONCE = frozenset({"contrastive", "fedonce", "head", "evaluate", "predict"})


# Measured leaks of exchanges like those of a recipe, with the page of results for each.
#
# They are results of the attacks in ``vfl leaks`` on public data. Other data may leak more or less,
# and another attack may reveal more, so each result is a lower bound. A test compares the numbers
# with the pages of results.
@dataclass(frozen=True)
class Measured:
    """A measured leak of one kind of exchange.

    Args:
        phases: The kinds of phases with this exchange.
        role: The role of the sender, or None for both.
        kind: The kind of values that are sent.
        line: The result in words.
        page: The page in ``docs``.
        figures: The numbers of ``line``, as they are written on the page.
        defences: The names of the transforms for which the result is also valid, such as ``Marvell
            noise``.
        tensors: The name of the tensors, if the phase sends others of this kind; else ''.
    """

    phases: frozenset[str]
    role: Literal["active", "passive"] | None
    kind: Kind
    line: str
    page: str
    figures: tuple[str, ...]
    defences: tuple[str, ...] = ()
    tensors: str = ""

    def describe(self, transforms: Sequence[str]) -> str:
        """Returns the result in words for an exchange with these transforms.

        The text names the transforms for which nothing was measured.
        """
        unmeasured = [
            transform for transform in transforms if not transform.startswith(self.defences)
        ]
        if not unmeasured:
            return self.line
        return f"nothing was measured with {list_names(unmeasured)}; without it, {self.line}"


_CREDIT = "on credit default without a defence"


MEASURED = (
    Measured(
        frozenset({PHASE}),
        None,
        Kind.ROWS,
        "a server with a list of the same people named 100 % of 1,000 rows of FEBRL 4 from "
        "encodings, with no row known",
        "security/private-alignment.md",
        ("**at least 100 %**",),
        tensors="encodings",
    ),
    Measured(
        frozenset({"splitnn"}),
        "passive",
        Kind.EMBEDDING,
        f"{_CREDIT}, the active party read ten columns from embeddings of 8 numbers with R² 0.920, "
        "and found 80 % of the people among 500, with 2,000 rows known",
        "results/leaks-columns.md",
        ("0.920", "0.801"),
    ),
    Measured(
        ONCE,
        "passive",
        Kind.EMBEDDING,
        f"{_CREDIT}, the active party read ten columns from embeddings that were sent once with R² "
        "0.805 to 0.944, with 2,000 rows known",
        "results/leaks-columns.md",
        ("0.805", "0.944"),
    ),
    Measured(
        frozenset({"splitnn"}),
        "active",
        Kind.GRADIENT,
        "on credit default, the passive party read the labels from gradients with AUC 1.00, "
        "without a defence and with Marvell noise, with no label known",
        "results/leaks-labels.md",
        ("1.00 / 1.000",),
        ("Marvell noise",),
    ),
    Measured(
        frozenset({"fedhssl"}),
        "active",
        Kind.WEIGHTS,
        "on MNIST in halves, shared weights told which rows were trained on with AUC 0.529 at "
        "most; chance is 0.545 in one shuffle of twenty",
        "results/leaks-columns.md",
        ("0.529", "0.545"),
    ),
    Measured(
        frozenset({"fedhssl"}),
        "passive",
        Kind.WEIGHTS,
        "on MNIST in halves, shared weights told which rows were trained on with AUC 0.524 at "
        "most; chance is 0.545 in one shuffle of twenty",
        "results/leaks-columns.md",
        ("0.524", "0.545"),
    ),
    Measured(
        frozenset({"secureboost"}),
        "passive",
        Kind.ROWS,
        "on credit default, the active party read ten columns from the sides of splits of 30 trees "
        "with R² 0.836, with 2,000 rows known",
        "results/secureboost.md",
        ("0.836",),
    ),
    Measured(
        frozenset({"secureboost"}),
        "active",
        Kind.ROWS,
        "on credit default, the passive party read labels from the nodes of 30 trees with AUC "
        "0.734; its own columns give 0.685",
        "results/secureboost.md",
        ("0.734", "0.685"),
    ),
)


def get_measurement(phase_kind: str, role: str, kind: str, carries: str = "") -> Measured | None:
    """Returns the measured leak of an exchange, or None if none was measured.

    ``carries``: The contents of the bundles, see ``Leaving``.
    """
    return next(
        (
            measurement
            for measurement in MEASURED
            if phase_kind in measurement.phases
            and measurement.role in (None, role)
            and measurement.kind.label == kind
            and measurement.tensors in carries
        ),
        None,
    )
