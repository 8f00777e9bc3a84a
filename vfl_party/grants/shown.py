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
from vfl_common.text import aligned, count
from vfl_party.account.limits import Balance, guards_without_run
from vfl_party.assembly.files import PartyFiles
from vfl_party.assembly.party import Assembled, Opened, assemble, expected_rows
from vfl_party.forecast.count import forecast_of
from vfl_party.forecast.result import CountedForecast
from vfl_party.grants.grant import Grant
from vfl_party.grants.measured import NOTHING, measured
from vfl_party.outbound.chains import PASSIVES
from vfl_party.policy.planned import planned
from vfl_party.predict.prediction import PHASE as PREDICT
from vfl_party.predict.prediction import predicted

_HEAD = ("phase", "to", "kind", "people", "bundles", "bytes", "carries", "defences")
_RIGHT = frozenset({"people", "bundles", "bytes"})
# Between what one peer gets of a kind.
_JOINED = "; "
_PAGES = "docs/results"
# What shapes call a number of rows, or of bits or points that are one for each row.
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
        chains = (each.split(ARROW)[:-2] for each in self.defences.split(_JOINED))
        return tuple(dict.fromkeys(step for chain in chains for step in chain))

    @property
    def lines(self) -> Iterator[tuple[str, ...]]:
        """The cells of its lines for people: one, and one more for each further thing that it
        carries.
        """
        numbers = (self.people, self.bundles, self.payload_bytes)
        known = ("?" if each is None else f"{each:,}" for each in numbers)
        start: tuple[str, ...] = (self.phase, self.to, self.kind, *known)
        cells = (self.carries.split(_JOINED), self.defences.split(_JOINED))
        for ends in zip_longest(*cells, fillvalue=""):
            yield (*start, *ends)
            start = ("",) * len(start)


@dataclass(frozen=True)
class Outlook:
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
        return sum(each.payload_bytes or 0 for each in self.leaves)


def look(files: PartyFiles, runs: int = 1, predictions: int = 0) -> tuple[Opened, Outlook]:
    """Makes the party as for a run, and counts what would leave. Raises InputError, also if the
    party's policy never lets out what the recipe asks for. ``runs``, ``predictions``: of
    the grant.
    """
    opened = files.open()
    made = assemble(opened, expected_rows(opened), policy=files.policy(), trees=files.file.trees)
    counted, why = _counted(files, made)
    plan = planned(made.party, len(made.prepared.table)) if counted is not None else None
    private = made.party.privacy
    leaves = tuple(_leaves(files, made, counted))
    of_prediction = tuple(
        _of_exchange(files, each, len(opened.table), PREDICT) for each in predicted(made.party)
    )
    said = private.report().statement if private is not None else ""
    numbers = dict(plan.numbers) if plan is not None else {}
    balances = tuple(
        each
        for guard in guards_without_run(files.file)
        for each in guard.balances(opened, made.party, runs, predictions)
    )
    of_runs = (leaves, of_prediction, numbers, balances, said, why)
    return opened, Outlook(files.settings.role, len(opened.table), *of_runs)


def _counted(files: PartyFiles, made: Assembled) -> tuple[CountedForecast | None, str]:
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
        for each in made.leaves:
            yield _of_exchange(files, each, rows, kinds.get(each.phase, each.phase))
        return
    for link in counted.links:
        if link.sender != files.name or not link.messages:
            continue
        of = [each for each in made.leaves if _is_of(each, link.phase, link.receiver, link.kind)]
        # Nothing but acknowledgements.
        if not of:
            continue
        told = any(_tells(each, link.kind) for each in of)
        yield Leaving(
            link.phase,
            kinds.get(link.phase, link.phase),
            link.receiver,
            link.kind,
            rows if told else 0,
            link.messages,
            link.payload_bytes,
            _JOINED.join(dict.fromkeys(each.carries for each in of)),
            _JOINED.join(dict.fromkeys(each.chain for each in of)),
        )


def _kinds(files: PartyFiles) -> Mapping[str, str]:
    return {phase.name: phase.kind for phase in files.course.phases}


def _is_of(each: ExchangeSummary, phase: str, receiver: str, kind: str) -> bool:
    return each.phase == phase and each.receiver in (receiver, PASSIVES) and _kind_of(each) == kind


def _kind_of(each: ExchangeSummary) -> str:
    """Returns the kind of what is sent: the first word; see ``Sent``."""
    return each.sent.partition(" ")[0].rstrip(":")


def _tells(each: ExchangeSummary, kind: str) -> bool:
    """Whether something tells of rows one by one. Of many tensors the shapes are not said: all but
    weights are taken to do.
    """
    return bool(_OF_ROWS.search(each.sent)) or (f"{kind}: " in each.sent and kind != "weights")


def _of_exchange(files: PartyFiles, each: ExchangeSummary, rows: int, phase_kind: str) -> Leaving:
    """Returns what is known of an exchange whose bytes are not."""
    _ = files
    kind = _kind_of(each)
    people = rows if _tells(each, kind) else 0
    if phase_kind == PREDICT:
        people = 1 if people else 0
    return Leaving(
        each.phase,
        phase_kind,
        each.receiver,
        kind,
        people,
        None,
        None,
        each.carries,
        each.chain,
    )


def described(grant: Grant, files: PartyFiles, found: Outlook) -> Iterator[str]:
    """Yields the lines that a person reads before signing."""
    yield f"{grant.party} would allow: {grant}"
    yield f"recipe: {grant.recipe}, digest {grant.digest}, phases {', '.join(grant.phases)}"
    yield f"table: {found.rows:,} people, who may all be told of"
    for name, pin in grant.peers.items():
        yield f"to: {name}, key {pin}"
    if grant.runs:
        yield ""
        size = f", at most {found.payload_bytes:,} bytes in all" if not found.uncounted else ""
        yield f"in each run would leave{size}:"
        yield from _table(found.leaves)
        for peer, most in found.numbers.items():
            yield f"about one person {peer} would get at most {count(most, 'number')} in a run"
        if found.uncounted:
            yield f"bytes are not counted: {found.uncounted}"
    if grant.predictions:
        yield ""
        yield f"of each predicted row, for at most {grant.predictions:,} rows:"
        nothing = ["nothing but the ids that are asked for"]
        yield from _table(found.of_prediction) if found.of_prediction else nothing
    yield ""
    yield "attacks on such exchanges read at least, on public data:"
    yield from _measured(found, grant)
    yield ""
    yield from _spent(grant, found, files)


def _table(leaves: Sequence[Leaving]) -> list[str]:
    return aligned([_HEAD, *(line for each in leaves for line in each.lines)], _RIGHT)


def _measured(found: Outlook, grant: Grant) -> Iterator[str]:
    of = [
        *(found.leaves if grant.runs else ()),
        *(found.of_prediction if grant.predictions else ()),
    ]
    said: dict[str, list[str]] = {}
    for each in of:
        one = measured(each.phase_kind, found.role, each.kind)
        line = NOTHING
        if one is not None:
            line = f"{one.said_of(each.transforms)} ({_PAGES}/{one.page})"
        said.setdefault(line, []).append(f"{each.phase} {each.kind}")
    for line, exchanges in said.items():
        yield f"  {', '.join(dict.fromkeys(exchanges))}: {line}"


def _spent(grant: Grant, found: Outlook, files: PartyFiles) -> Iterator[str]:
    """Yields what the grant would spend."""
    runs, rows = count(grant.runs, "run"), count(grant.predictions, "predicted row")
    size = f" of together {grant.runs * found.payload_bytes:,} bytes" if not found.uncounted else ""
    parts = ([runs + size] if grant.runs else []) + ([rows] if grant.predictions else [])
    yield f"it would spend at most: {', '.join(parts)}"
    for each in found.balances:
        yield each.words(grant.runs, grant.predictions)
    begun = len(_earlier(files))
    yield f"this recipe has had {count(begun, 'run')} of {files.name} before"
    if found.privacy:
        yield f"differential privacy, of one run: {found.privacy}"
    elif grant.runs:
        yield (
            "differential privacy: the recipe does not train with dp, so nothing bounds all that a "
            "run tells; vfl-party account adds up the noise on messages"
        )


def _earlier(files: PartyFiles) -> list[Path]:
    """Returns the folders of the party's runs of the recipe."""
    found, digest = [], files.recipe.digest()
    for path in Path(files.file.out).glob(f"*/{files.name}/run.json"):
        try:
            facts = RunFolder(path.parent, path.parent.parent.name).facts()
        except InputError:
            continue
        if facts.get("recipe_digest") == digest and facts.get("job") == "train":
            found.append(path.parent)
    return found
