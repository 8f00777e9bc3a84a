"""Counts the exchanges of a run, phase by phase, with the sizes of the wire encoder."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby, takewhile
from pathlib import Path

import torch

from vfl_common.config.base import parse, read_toml
from vfl_common.config.data import DataSettings, ids_only
from vfl_common.config.division import divide
from vfl_common.config.kind_of_file import kind_of, read_tables
from vfl_common.config.models import EncoderSettings
from vfl_common.config.party import check_code, load_party
from vfl_common.config.recipe import Recipe, load_recipe
from vfl_common.errors import Code, InputError
from vfl_common.summary import ExchangeSummary, LinkBytes
from vfl_common.wire.frames import sizes
from vfl_party.align import alignment_of
from vfl_party.assembly.models import encoder_settings
from vfl_party.assembly.party import Load, load
from vfl_party.assembly.trial import try_parties, try_party
from vfl_party.base.plugins import name_plugin_errors
from vfl_party.data.rows import divide_rows
from vfl_party.forecast.load import encoder_loads
from vfl_party.forecast.result import CountedForecast, PhaseForecast, StepRun
from vfl_party.forecast.runs import Runs
from vfl_party.outbound.chain import Chains
from vfl_party.outbound.chains import summarize_exchanges
from vfl_party.outbound.declared import NOTHING, Occurrence, Traffic
from vfl_party.outbound.policies import Policy, load_trial_policy
from vfl_party.outbound.policies import load as load_policy
from vfl_party.outbound.policies.allow_all import AllowAll
from vfl_party.phases.context import Party, PartyData
from vfl_party.phases.course import Course

# Maximum steps of a phase: counting them takes about half a minute.
MAX_STEPS = 1_000_000


@dataclass(frozen=True)
class Outlook:
    """The party whose data the forecast reads. One is enough: all hold the same ids.

    Args:
        data: None if it has none here.
        file: the recipe's.
        folder: base of the recipe's relative paths; None for a party file.
        load: reads a table.
    """

    recipe: Recipe
    name: str
    data: DataSettings | None
    encoder: EncoderSettings
    file: Path = Path("recipe")
    folder: Path | None = None
    policy: Policy = field(default_factory=AllowAll)
    load: Load = load


def read_outlook(path: Path) -> Outlook:
    """Reads a party file, or a recipe whose [simulate] names the data. Raises InputError."""
    folder = path.resolve().parent
    # The user's own encoder is imported from there.
    sys.path.append(str(folder))
    if kind_of(read_toml(path)) != "party file":
        tables = read_tables(path, "recipe")
        return replace(outlook_of(parse(Recipe, tables, str(path)), folder), file=path)
    file = load_party(path)
    recipe = load_recipe(Path(file.recipe))
    place = recipe.party(file.name)
    if place is None:
        known = ", ".join(party.name for party in recipe.parties)
        raise InputError(
            Code.NOT_IN_RECIPE,
            f"{path}: name: must be a party of recipe {recipe.name}, one of {known} (got "
            f"{file.name}). Correct the name.",
        )
    check_code(path, file, recipe)
    data = file.data if file.data is None or place.features else ids_only(file.data)
    encoder, policy = (
        encoder_settings(recipe, file.name, file.encoder),
        load_policy(file.policy, f"{path}: policy"),
    )
    return Outlook(recipe, file.name, data, encoder, Path(file.recipe), policy=policy)


def outlook_of(recipe: Recipe, folder: Path, load: Load = load) -> Outlook:
    """Returns the outlook of the first passive party, which has features and needs no label, or of
    a lone active party.

    The recipe's relative paths start at ``folder``. Raises InputError.
    """
    name = (recipe.passives or recipe.parties)[0].name
    data = divide(recipe, folder)[name] if recipe.simulate is not None else None
    return Outlook(
        recipe,
        name,
        data,
        encoder_settings(recipe, name, None),
        folder=folder,
        policy=load_trial_policy(recipe, name),
        load=load,
    )


def lone_party(outlook: Outlook, rows: int | None) -> tuple[Party, int]:
    """Returns the party as it is before it joins, without a connection, and the number of aligned
    rows.

    ``rows``: replaces the number of rows of the data, or of each passive party without an
    alignment; the party then has no features and no encoder. Raises InputError, also if ``data``
    are those of all parties and one of them refuses the recipe.
    """
    recipe, name, data = outlook.recipe, outlook.name, outlook.data
    course = Course(recipe)
    course.check()
    if rows is not None:
        splits = divide_rows(recipe, rows, drawn=False)
        holders = [party.name for party in recipe.passives] if recipe.rows.align == "none" else []
        course.check(len(splits["train"]))
        party = Party(
            name=name,
            course=course,
            device=torch.device("cpu"),
            # The top models know the size of the cut layer.
            models=course.upper(recipe.seed) if holders else {},
            data=PartyData(
                splits,
                holdings={
                    holder: {key: len(of) for key, of in splits.items()} for holder in holders
                },
            ),
            policy=outlook.policy,
        )
        return party, rows
    if (
        outlook.folder is None
        and recipe.rows.align == "none"
        and recipe.passives
        and name == recipe.active.name
    ):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{name}: does not know how many rows the other parties have. Give --rows N, the rows "
            "of each of them.",
        )
    if data is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe {recipe.name}: does not say where the data are, so the number of rows is "
            "unknown. Give --rows N, or a party file with a [data] table.",
        )
    if recipe.simulate is not None and outlook.folder is not None:
        # What another party would refuse is refused here too.
        tried = try_parties(recipe, outlook.folder, outlook.load)
        others = {other: trial.party for other, trial in tried.items() if other != name}
        party = replace(tried[name].party, others=others)
        # With rows.partial, the active party's table has all rows.
        whole = recipe.active.name if recipe.rows.partial else name
        return party, len(tried[whole].prepared.table)
    assembled = try_party(recipe, name, data, outlook.encoder, policy=outlook.policy)
    return assembled.party, len(assembled.prepared.table)


def forecast(
    outlook: Outlook, rows: int | None = None, ended: Mapping[str, int] | None = None
) -> CountedForecast:
    """Counts the whole run. ``ended``: {phase: rounds}, limits phases with early stopping to these
    rounds.

    Raises InputError if a party refuses a phase, if a phase in ``ended`` cannot end early, or if
    one is too long.
    """
    party, rows = lone_party(outlook, rows)
    return forecast_of(party, rows, ended)


@name_plugin_errors()
def forecast_of(party: Party, rows: int, ended: Mapping[str, int] | None = None) -> CountedForecast:
    """Counts the whole run of ``party``'s recipe; ``party``: from ``lone_party``. Raises as
    ``forecast``.
    """
    recipe, count = party.recipe, _Count()
    opening = groupby(
        alignment_of(recipe).occurrences(rows), key=lambda occurrence: occurrence.step.phase
    )
    phases = []
    for name, of in opening:
        runs = count.add(party, of, in_flight=0)
        phases.append(PhaseForecast(name=name, kind=name, round_trips=_trips(runs), runs=runs))
    limits = dict(ended or {})
    for phase in party.course.phases:
        stated = phase.method.traffic(party, phase.name, phase.settings)
        traffic = stated if stated is not None else Traffic()
        max_rounds = limits.pop(phase.name, None) if traffic.may_end_early else None
        runs = count.of(party, traffic, max_rounds)
        phases.append(
            PhaseForecast(
                name=phase.name,
                kind=phase.kind,
                round_trips=_trips(runs),
                at_most=traffic.may_end_early and max_rounds is None,
                unknown=stated is None,
                bound=traffic.bound,
                runs=runs,
            )
        )
    if limits:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--rounds: {next(iter(limits))} is not a phase that may end early. Set its number of "
            "rounds in the recipe.",
        )
    return CountedForecast(
        recipe=recipe.name,
        rows=rows,
        server=recipe.server,
        parties=tuple(party.name for party in recipe.parties),
        phases=tuple(phases),
        links=count.links(),
        exchanges=tuple(count.exchanges),
        encoders=tuple(encoder_loads(party)),
    )


def read_rounds(texts: Iterable[str]) -> dict[str, int]:
    """Reads each ``PHASE=N`` of the command line as {phase: N}. Raises InputError."""
    limits = {}
    for text in texts:
        phase, _, number = text.partition("=")
        if not (phase and number.isascii() and number.isdigit() and int(number[:10]) > 0):
            raise InputError(
                Code.CONFIG_INVALID,
                f"--rounds: must be PHASE=N (got {text}). Give for example splitnn=20.",
            )
        limits[phase] = int(number[:10])
    return limits


def _first_rounds(
    occurrences: Iterable[Occurrence], max_rounds: int | None
) -> Iterable[Occurrence]:
    if max_rounds is None:
        return occurrences
    return takewhile(lambda occurrence: occurrence.step.round < max_rounds, occurrences)


def _trips(runs: Iterable[StepRun]) -> int:
    return sum(run.times * run.steps for run in runs)


class _Count:
    """Sums exchanges by sender, receiver, phase and kind, as the ledger does."""

    def __init__(self) -> None:
        self.exchanges: list[ExchangeSummary] = []
        # Payload bytes, message bytes, messages.
        self._sums: dict[tuple[str, str, str, str], list[int]] = {}

    def of(self, party: Party, traffic: Traffic, rounds: int | None) -> tuple[StepRun, ...]:
        """Adds a phase's first ``rounds`` (None: all), and what follows them; see ``add``."""
        last = traffic.after(rounds) if traffic.after is not None else ()
        whole = itertools.chain(_first_rounds(traffic.occurrences, rounds), last)
        return self.add(party, whole, traffic.in_flight, traffic.parts, traffic.step)

    def add(
        self,
        party: Party,
        occurrences: Iterable[Occurrence],
        in_flight: int = 1,
        parts: int = 1,
        trains: str = "",
    ) -> tuple[StepRun, ...]:
        """Returns the steps that were added, one for each step key and peer. Raises InputError if
        there are too many.

        ``party``: any one; except for their policies, all have the same chains. ``in_flight``,
        ``parts``, ``trains``: see ``Runs``.
        """
        recipe, runs = party.recipe, Runs(in_flight, parts, trains)
        passives, everybody = (
            tuple(party.name for party in of) for of in (recipe.passives, recipe.parties)
        )
        chains: dict[int, Chains] = {}
        for number, occurrence in enumerate(occurrences):
            exchange, phase = occurrence.exchange, occurrence.step.phase
            if number == MAX_STEPS:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"phase {phase}: has more than {MAX_STEPS:,} steps, too many to count. "
                    "Forecast fewer, for example fewer epochs: bytes and time grow in proportion.",
                )
            asks_server = exchange.asks == "server"
            asking = everybody if asks_server and not exchange.passive else passives
            peer = recipe.server if asks_server else recipe.active.name
            if not asking:
                # The active party is alone.
                continue
            if occurrence.party is not None:
                asking = (
                    (occurrence.party,) if isinstance(occurrence.party, str) else occurrence.party
                )
            runs.begin(occurrence, peer)
            if id(exchange) not in chains:
                chains[id(exchange)] = known = party.chains(phase, exchange)
                self.exchanges += summarize_exchanges(
                    recipe,
                    phase,
                    exchange,
                    known,
                    after_labels=party.course.after_labels(phase),
                )
            known = chains[id(exchange)]
            for sent, chain, up in (
                (exchange.up, known.up, True),
                (exchange.down, known.down, False),
            ):
                spec = (
                    NOTHING.spec()
                    if occurrence.empty == ("up" if up else "down")
                    else chain.wire_spec(exchange.spec(sent, phase, dict(occurrence.sizes)))
                )
                size = sizes(occurrence.step, spec)
                runs.add(size, len(asking), up)
                for name in asking:
                    ends = (name, peer) if up else (peer, name)
                    total = self._sums.setdefault((*ends, phase, spec.kind.label), [0, 0, 0])
                    for place, value in enumerate(size):
                        total[place] += value
        return runs.finish()

    def links(self) -> tuple[LinkBytes, ...]:
        return tuple(
            LinkBytes(
                sender=sender,
                receiver=receiver,
                phase=phase,
                kind=kind,
                payload_bytes=payload,
                message_bytes=message,
                messages=messages,
            )
            for (sender, receiver, phase, kind), (payload, message, messages) in self._sums.items()
        )
