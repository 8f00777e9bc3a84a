"""What a person reads before a grant is signed: what would leave, to whom, about how many people,
under which defences, and what was measured of such exchanges.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from vfl_common.errors import InputError
from vfl_common.run_folder import RunFolder
from vfl_common.summary import ARROW, ExchangeSummary
from vfl_common.text import align_columns, count
from vfl_party.account.limits import Balance, guards_without_run
from vfl_party.assembly.files import PartyFiles
from vfl_party.assembly.party import Assembled, OpenedParty, assemble, expect_rows
from vfl_party.forecast.count import forecast_of
from vfl_party.forecast.result import CountedForecast
from vfl_party.grants.grant import Grant
from vfl_party.grants.measured import NOTHING, get_measurement
from vfl_party.outbound.chains import PASSIVES
from vfl_party.policy.planned import plan_sent
from vfl_party.predict.prediction import PHASE as PREDICT
from vfl_party.predict.prediction import plan_exchanges

_HEAD = ("phase", "to", "kind", "people", "bundles", "bytes", "carries", "defences")
_RIGHT = frozenset({"people", "bundles", "bytes"})
# The separator of several things of a kind that one peer receives.
_JOINED = "; "
_PAGES = "docs/results"
# Names in shapes for a number of rows, or of bits or points with one for each row.
_OF_ROWS = re.compile(r"\[(rows|own|packed|up|down|tags|bits)\b")


@dataclass(frozen=True)
class Leaving:
    """What one peer gets in a phase, of one kind.

    ``people``: of how many rows it tells one by one, at most; 0: of nobody alone; None: unknown
    before the run. ``bundles``, ``payload_bytes``: in a run, at most; None: unknown before it.
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
        """The transforms that it passes, in words: the steps of its chains before the policy and
        the codec.
        """
        chains = (chain_text.split(ARROW)[:-2] for chain_text in self.defences.split(_JOINED))
        return tuple(dict.fromkeys(step for chain in chains for step in chain))

    @property
    def lines(self) -> Iterator[tuple[str, ...]]:
        """The cells of its lines for people: one, and one more for each further thing that it
        carries.
        """
        numbers = (self.people, self.bundles, self.payload_bytes)
        known = ("?" if number is None else f"{number:,}" for number in numbers)
        start: tuple[str, ...] = (self.phase, self.to, self.kind, *known)
        cells = (self.carries.split(_JOINED), self.defences.split(_JOINED))
        for ends in zip_longest(*cells, fillvalue=""):
            yield (*start, *ends)
            start = ("",) * len(start)


@dataclass(frozen=True)
class GrantOutlook:
    """What a recipe would have a party send.

    ``rows``: how many its table has. ``leaves``: in a run. ``of_prediction``: about predicted rows.
    ``numbers``: {peer: about one person in a run, at most}, as far as the phases say it.
    ``balances``: what the grant would leave of the account's limits.
    ``privacy``: the sentence about differential privacy; '' if there is none. ``uncounted``: why
    the bytes are not known; '' if they are.
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
        """Of all that would leave in a run, as far as it is known."""
        return sum(exchange.payload_bytes or 0 for exchange in self.leaves)


def look(
    files: PartyFiles, runs: int = 1, predictions: int = 0
) -> tuple[OpenedParty, GrantOutlook]:
    """Makes the party as for a run, and counts what would leave. Raises InputError, also if the
    party's policy never lets out what the recipe asks for. ``runs``, ``predictions``: of
    the grant.
    """
    opened = files.open()
    made = assemble(opened, expect_rows(opened), policy=files.policy(), trees=files.file.trees)
    counted, why = _count_bytes(files, made)
    plan = plan_sent(made.party, len(made.prepared.table)) if counted is not None else None
    private = made.party.privacy
    leaves = tuple(_leaves(files, made, counted))
    of_prediction = tuple(
        _of_exchange(files, item, len(opened.table), PREDICT) for item in plan_exchanges(made.party)
    )
    statement = private.report().statement if private is not None else ""
    numbers = dict(plan.numbers) if plan is not None else {}
    balances = tuple(
        item
        for guard in guards_without_run(files.file)
        for item in guard.balances(opened, made.party, runs, predictions)
    )
    of_runs = (leaves, of_prediction, numbers, balances, statement, why)
    return opened, GrantOutlook(files.settings.role, len(opened.table), *of_runs)


def _count_bytes(files: PartyFiles, made: Assembled) -> tuple[CountedForecast | None, str]:
    """Returns the forecast, or None and why there is none."""
    if files.recipe.rows.align == "none" and files.is_active and files.recipe.passives:
        return None, "only the other parties know how many rows they have"
    try:
        return forecast_of(made.party, len(made.prepared.table)), ""
    except InputError as error:
        return None, str(error)


def _leaves(
    files: PartyFiles, made: Assembled, counted: CountedForecast | None
) -> Iterator[Leaving]:
    """Yields what leaves, in the order of the phases."""
    rows, kinds = len(made.prepared.table), _kinds(files)
    if counted is None:
        for exchange in made.leaves:
            yield _of_exchange(files, exchange, rows, kinds.get(exchange.phase, exchange.phase))
        return
    for link in counted.links:
        if link.sender != files.name or not link.messages:
            continue
        exchanges = [
            exchange
            for exchange in made.leaves
            if _is_of(exchange, link.phase, link.receiver, link.kind)
        ]
        # Nothing but acknowledgements.
        if not exchanges:
            continue
        about_rows = any(_tells(exchange, link.kind) for exchange in exchanges)
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


def _kinds(files: PartyFiles) -> Mapping[str, str]:
    return {phase.name: phase.kind for phase in files.course.phases}


def _is_of(exchange: ExchangeSummary, phase: str, receiver: str, kind: str) -> bool:
    return (
        exchange.phase == phase
        and exchange.receiver in (receiver, PASSIVES)
        and _kind_of(exchange) == kind
    )


def _kind_of(exchange: ExchangeSummary) -> str:
    """Returns the kind of what is sent: the first word; see ``Sent``."""
    return exchange.sent.partition(" ")[0].rstrip(":")


def _tells(exchange: ExchangeSummary, kind: str) -> bool:
    """Whether something tells of rows one by one. Of many tensors the shapes are not said: all but
    weights are taken to do.
    """
    return bool(_OF_ROWS.search(exchange.sent)) or (
        f"{kind}: " in exchange.sent and kind != "weights"
    )


def _of_exchange(
    files: PartyFiles, exchange: ExchangeSummary, rows: int, phase_kind: str
) -> Leaving:
    """Returns what is known of an exchange whose bytes are not."""
    _ = files
    kind = _kind_of(exchange)
    people = rows if _tells(exchange, kind) else 0
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
    yield f"table: {outlook.rows:,} people; the run may be about all of them"
    for name, pin in grant.peers.items():
        yield f"to: {name}, key {pin}"
    if grant.runs:
        yield ""
        size = f", at most {outlook.payload_bytes:,} bytes in all" if not outlook.uncounted else ""
        yield f"in each run would leave{size}:"
        yield from _table(outlook.leaves)
        for peer, maximum in outlook.numbers.items():
            yield f"about one person {peer} would get at most {count(maximum, 'number')} in a run"
        if outlook.uncounted:
            yield f"bytes are not counted: {outlook.uncounted}"
    if grant.predictions:
        yield ""
        yield f"of each predicted row, for at most {grant.predictions:,} rows:"
        nothing = ["nothing but the ids that are asked for"]
        yield from _table(outlook.of_prediction) if outlook.of_prediction else nothing
    yield ""
    yield "attacks on such exchanges read at least, on public data:"
    yield from _describe_measurements(outlook, grant)
    yield ""
    yield from _describe_spending(grant, outlook, files)


def _table(leaves: Sequence[Leaving]) -> list[str]:
    return align_columns([_HEAD, *(line for exchange in leaves for line in exchange.lines)], _RIGHT)


def _describe_measurements(outlook: GrantOutlook, grant: Grant) -> Iterator[str]:
    exchanges_ = [
        *(outlook.leaves if grant.runs else ()),
        *(outlook.of_prediction if grant.predictions else ()),
    ]
    exchanges_by_line: dict[str, list[str]] = {}
    for exchange in exchanges_:
        one = get_measurement(exchange.phase_kind, outlook.role, exchange.kind)
        line = NOTHING
        if one is not None:
            line = f"{one.describe(exchange.transforms)} ({_PAGES}/{one.page})"
        exchanges_by_line.setdefault(line, []).append(f"{exchange.phase} {exchange.kind}")
    for line, exchanges in exchanges_by_line.items():
        yield f"  {', '.join(dict.fromkeys(exchanges))}: {line}"


def _describe_spending(grant: Grant, outlook: GrantOutlook, files: PartyFiles) -> Iterator[str]:
    """Yields what the grant would spend."""
    runs, rows = count(grant.runs, "run"), count(grant.predictions, "predicted row")
    size = (
        f" of {grant.runs * outlook.payload_bytes:,} bytes in all" if not outlook.uncounted else ""
    )
    parts = ([runs + size] if grant.runs else []) + ([rows] if grant.predictions else [])
    yield f"it would spend at most: {', '.join(parts)}"
    for balance in outlook.balances:
        yield balance.words(grant.runs, grant.predictions)
    begun = len(_earlier(files))
    yield f"this recipe has had {count(begun, 'run')} of {files.name} before"
    if outlook.privacy:
        yield f"differential privacy, of one run: {outlook.privacy}"
    elif grant.runs:
        yield (
            "differential privacy: the recipe does not train with dp, so nothing bounds all that a "
            "run reveals; vfl-party account adds up the noise on messages"
        )


def _earlier(files: PartyFiles) -> list[Path]:
    """Returns the folders of the party's runs of the recipe."""
    folders, digest = [], files.recipe.digest()
    for path in Path(files.file.out).glob(f"*/{files.name}/run.json"):
        try:
            facts = RunFolder(path.parent, path.parent.parent.name).facts()
        except InputError:
            continue
        if facts.get("recipe_digest") == digest and facts.get("job") == "train":
            folders.append(path.parent)
    return folders
