"""Counts the exchanged bytes of a run for each phase, with the sizes of encoded messages."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import groupby, takewhile
from pathlib import Path

import torch
from torch import Tensor, nn

from vfl_common.bundle import StepKey
from vfl_common.config.base import detect_kind, parse, read_tables, read_toml
from vfl_common.config.data import DataSettings, without_features
from vfl_common.config.models import EncoderSettings
from vfl_common.config.party import check_code, load_party
from vfl_common.config.recipe import Recipe, divide, load_recipe
from vfl_common.errors import Code, InputError
from vfl_common.frames import BundleSizes, sizes
from vfl_common.summary import ExchangeSummary, LinkBytes
from vfl_party.align import list_occurrences
from vfl_party.assembly.models import encoder_settings
from vfl_party.assembly.party import Load, load
from vfl_party.assembly.trial import try_parties, try_party
from vfl_party.base.plugins import name_plugin_errors
from vfl_party.data.rows import divide_rows
from vfl_party.forecast.result import CountedForecast, EncoderLoad, PhaseForecast, StepRun
from vfl_party.models import InputSpec
from vfl_party.outbound.chain import Chains
from vfl_party.outbound.chains import summarize_exchanges
from vfl_party.outbound.declared import NOTHING, Occurrence, Traffic
from vfl_party.outbound.policies import AllowAll, Policy, load_trial_policy
from vfl_party.outbound.policies import load as load_policy
from vfl_party.phases.context import Party, PartyTerms
from vfl_party.phases.course import Course
from vfl_party.phases.rows import PartyData

# The maximum number of steps in a phase. Counting them takes about half a minute.
MAX_STEPS = 1_000_000


@dataclass(frozen=True)
class Outlook:
    """The party whose data the forecast reads. One party is enough, because all have the same ids.

    Args:
        recipe: The recipe.
        name: The party's name.
        data: The settings of the party's data, or None if the data are not here.
        encoder: The settings of the party's encoder.
        file: The recipe's file.
        folder: The base of the recipe's relative paths. None for a party file.
        policy: The party's policy.
        load: Reads a table.
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
    """Reads a party file, or a recipe with [simulate]. Raises InputError if it is invalid."""
    folder = path.resolve().parent
    # The user's encoder is imported from this folder.
    sys.path.append(str(folder))
    if detect_kind(read_toml(path)) != "party file":
        tables = read_tables(path, "recipe")
        return replace(outlook_of(parse(Recipe, tables, str(path)), folder), file=path)
    file = load_party(path)
    recipe = load_recipe(Path(file.recipe))
    place = recipe.party(file.name)
    if place is None:
        names = ", ".join(party.name for party in recipe.parties)
        raise InputError(
            Code.NOT_IN_RECIPE,
            f"{path}: name: must be a party of recipe {recipe.name}, one of {names} (got "
            f"{file.name}). Correct the name.",
        )
    check_code(path, file, recipe)
    data = file.data if file.data is None or place.features else without_features(file.data)
    encoder, policy = (
        encoder_settings(recipe, file.name, file.encoder),
        load_policy(file.policy, f"{path}: policy"),
    )
    return Outlook(recipe, file.name, data, encoder, Path(file.recipe), policy=policy)


def outlook_of(recipe: Recipe, folder: Path, load: Load = load) -> Outlook:
    """Returns the outlook for the first passive party, or for an active party without others.

    A passive party has features and needs no label. ``folder``: The base of the recipe's relative
    paths. Raises InputError if the recipe is invalid.
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
    """Returns the party in the state before it joins, and the number of aligned rows.

    ``rows``: The number of rows instead of that of the data. Without an entity alignment it is the
    number at each passive party. The party then has no features and no encoder. Raises InputError
    if the party refuses the recipe, or if another party does and its data are here.
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
            # The top models determine the size of the cut layer.
            models=course.upper(recipe.seed) if holders else {},
            data=PartyData(
                splits,
                holdings={
                    holder: {key: len(rows_) for key, rows_ in splits.items()} for holder in holders
                },
            ),
            terms=PartyTerms(outlook.policy),
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
        # This raises an error if another party would refuse the recipe.
        assembled_parties = try_parties(recipe, outlook.folder, outlook.load)
        other_parties = {
            other: trial.party for other, trial in assembled_parties.items() if other != name
        }
        party = assembled_parties[name].party
        party.exchanges.others = other_parties
        # With rows.partial, the active party's table has all rows.
        name_with_all_rows = recipe.active.name if recipe.rows.partial else name
        return party, len(assembled_parties[name_with_all_rows].prepared.table)
    assembled = try_party(recipe, name, data, outlook.encoder, policy=outlook.policy)
    return assembled.party, len(assembled.prepared.table)


def forecast(
    outlook: Outlook, rows: int | None = None, ended: Mapping[str, int] | None = None
) -> CountedForecast:
    """Forecasts the whole run.

    ``ended``: {phase: number of rounds} for phases that are assumed to stop early. Raises
    InputError if a party refuses a phase, if a phase in ``ended`` cannot stop early, or if a phase
    has too many steps.
    """
    party, rows = lone_party(outlook, rows)
    return forecast_of(party, rows, ended)


@name_plugin_errors()
def forecast_of(party: Party, rows: int, ended: Mapping[str, int] | None = None) -> CountedForecast:
    """Forecasts the whole run of a recipe.

    ``party``: A party from ``lone_party``. Raises the errors of ``forecast``.
    """
    recipe, counter = party.recipe, _ExchangeCounter()
    alignment_phases = groupby(
        list_occurrences(recipe, rows), key=lambda occurrence: occurrence.step.phase
    )
    phases = []
    for name, occurrences in alignment_phases:
        runs = counter.add(party, occurrences, in_flight=0)
        phases.append(
            PhaseForecast(name=name, kind=name, round_trips=_count_round_trips(runs), runs=runs)
        )
    limits = dict(ended or {})
    for phase in party.course.phases:
        declared_traffic = phase.method.traffic(party, phase.name, phase.settings)
        traffic = declared_traffic if declared_traffic is not None else Traffic()
        max_rounds = limits.pop(phase.name, None) if traffic.may_end_early else None
        runs = counter.add_phase(party, traffic, max_rounds)
        phases.append(
            PhaseForecast(
                name=phase.name,
                kind=phase.kind,
                round_trips=_count_round_trips(runs),
                at_most=traffic.may_end_early and max_rounds is None,
                unknown=declared_traffic is None,
                bound=traffic.bound,
                runs=runs,
            )
        )
    if limits:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--rounds: {next(iter(limits))} is not a phase that can stop early. Set its number of "
            "rounds in the recipe.",
        )
    return CountedForecast(
        recipe=recipe.name,
        rows=rows,
        server=recipe.server,
        parties=tuple(party.name for party in recipe.parties),
        phases=tuple(phases),
        links=counter.links(),
        exchanges=tuple(counter.exchanges),
        encoders=tuple(encoder_loads(party)),
    )


def read_rounds(texts: Iterable[str]) -> dict[str, int]:
    """Parses texts ``PHASE=N`` to {phase: N}. Raises InputError if a text is invalid."""
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


def _take_rounds(occurrences: Iterable[Occurrence], max_rounds: int | None) -> Iterable[Occurrence]:
    if max_rounds is None:
        return occurrences
    return takewhile(lambda occurrence: occurrence.step.round < max_rounds, occurrences)


def _count_round_trips(runs: Iterable[StepRun]) -> int:
    return sum(run.times * run.steps for run in runs)


class _ExchangeCounter:
    """Adds up bytes by sender, receiver, phase and kind, as the ledger does."""

    def __init__(self) -> None:
        self.exchanges: list[ExchangeSummary] = []
        # {(sender, receiver, phase, kind): [payload bytes, message bytes, messages]}.
        self._sums: dict[tuple[str, str, str, str], list[int]] = {}

    def add_phase(self, party: Party, traffic: Traffic, rounds: int | None) -> tuple[StepRun, ...]:
        """Adds the first ``rounds`` rounds of a phase (None means all), and its last exchanges."""
        last_occurrences = traffic.after(rounds) if traffic.after is not None else ()
        occurrences = itertools.chain(_take_rounds(traffic.occurrences, rounds), last_occurrences)
        return self.add(party, occurrences, traffic.in_flight, traffic.parts, traffic.step)

    def add(
        self,
        party: Party,
        occurrences: Iterable[Occurrence],
        in_flight: int = 1,
        parts: int = 1,
        trains: str = "",
    ) -> tuple[StepRun, ...]:
        """Adds the bytes of exchanges, and returns their steps grouped into runs.

        ``party``: Any party, because all have the same chains except for their policies.
        ``in_flight``, ``parts`` and ``trains``: See ``Runs``. Raises InputError if there are too
        many steps.
        """
        recipe, runs = party.recipe, Runs(in_flight, parts, trains)
        passives, all_parties = (
            tuple(party.name for party in parties) for parties in (recipe.passives, recipe.parties)
        )
        chains: dict[int, Chains] = {}
        for number, occurrence in enumerate(occurrences):
            exchange, phase = occurrence.exchange, occurrence.step.phase
            if number == MAX_STEPS:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"phase {phase}: has more than {MAX_STEPS:,} steps, which is too many to "
                    "count. Forecast fewer epochs; bytes and time are proportional to them.",
                )
            asks_server = exchange.asks == "server"
            asking = all_parties if asks_server and not exchange.passive else passives
            peer = recipe.server if asks_server else recipe.active.name
            if not asking:
                # There is no passive party, so nothing is sent.
                continue
            if occurrence.party is not None:
                only = occurrence.party
                asking = (only,) if isinstance(only, str) else only
            runs.begin(occurrence, peer)
            if id(exchange) not in chains:
                chains[id(exchange)] = exchange_chains = party.exchanges.make_chains(
                    phase, exchange
                )
                after_labels = party.course.after_labels(phase)
                self.exchanges += summarize_exchanges(
                    recipe, phase, exchange, exchange_chains, after_labels=after_labels
                )
            exchange_chains = chains[id(exchange)]
            for sent, chain, up in (
                (exchange.up, exchange_chains.up, True),
                (exchange.down, exchange_chains.down, False),
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
                    self._add_size((*ends, phase, spec.kind.label), size)
        return runs.finish()

    def _add_size(self, key: tuple[str, str, str, str], size: BundleSizes) -> None:
        total = self._sums.setdefault(key, [0, 0, 0])
        for place, value in enumerate(size):
            total[place] += value

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


# Batch normalisation needs more than one row.
_ROWS = 2


def encoder_loads(party: Party) -> Iterator[EncoderLoad]:
    """Yields the encoder's load for each party in this process that has an encoder.

    The parties are in the order of the recipe.
    """
    parties = {party.name: party, **party.exchanges.others}
    for name in (party_.name for party_ in party.recipe.parties):
        party_here = parties.get(name)
        if (
            party_here is not None
            and party_here.rows.features is not None
            and "encoder" in party_here.models
        ):
            yield _measure_load(
                party_here, party_here.models["encoder"], party_here.rows.features.spec
            )


def _measure_load(party: Party, encoder: nn.Module, spec: InputSpec) -> EncoderLoad:
    # This measures a copy, so that the batch normalisation statistics stay unchanged.
    encoder = deepcopy(encoder)
    inputs = [torch.zeros(_ROWS, *spec.shape)]
    if spec.cardinalities:
        inputs.append(torch.zeros(_ROWS, len(spec.cardinalities), dtype=torch.int64))
    weights = list(encoder.parameters())
    with torch.random.fork_rng(devices=[]):
        return EncoderLoad(
            party=party.name,
            rows=len(party.rows.get("local")),
            weights=sum(weight.numel() for weight in weights),
            weight_bytes=sum(weight.nbytes for weight in weights),
            flops_a_row=flops(encoder, inputs) // _ROWS,
            kept_bytes_a_row=_count_saved_bytes(encoder, inputs) // _ROWS,
        )


def flops(encoder: nn.Module, inputs: list[Tensor]) -> int:
    """Returns the floating-point operations of a forward pass. A multiply-add counts as two."""
    # This import takes a second and is only needed for a forecast.
    from torch.utils.flop_counter import FlopCounterMode

    encoder.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        encoder(*inputs)
    return int(counter.get_total_flops())


def _count_saved_bytes(encoder: nn.Module, inputs: list[Tensor]) -> int:
    """Returns the bytes, without weights, that a forward pass saves for the backward pass."""
    weight_storages = {parameter.untyped_storage().data_ptr() for parameter in encoder.parameters()}
    saved: dict[int, int] = {}

    def count_storage(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in weight_storages:
            saved[storage.data_ptr()] = storage.nbytes()
        return value

    encoder.train()
    with torch.autograd.graph.saved_tensors_hooks(count_storage, lambda value: value):
        # The output keeps the saved tensors alive until they are counted.
        out = encoder(*inputs)
    del out
    return sum(saved.values())


class Runs:
    """Groups the exchanges of one phase, which are added in their order.

    Args:
        in_flight: The maximum number of concurrent steps of the main exchange, or 0 if the phase
            trains nothing.
        parts: The number of steps of the main exchange that make up one batch.
        trains: The name of the main exchange. '' means the first exchange.
    """

    def __init__(self, in_flight: int, parts: int, trains: str = "") -> None:
        self._in_flight, self._parts = in_flight, parts
        # {(exchange, number of steps, byte and message totals): number of rounds}.
        self._counts: Counter[tuple[str, int, tuple[int, ...]]] = Counter()
        self._trains = trains
        self._last_step: tuple[StepKey, str] | None = None
        # The current run: exchange, peer and round.
        self._run: tuple[str, str, int] | None = None
        self._steps = 0
        # The current run's bytes up and down, and messages up and down.
        self._sums = [0, 0, 0, 0]

    def begin(self, occurrence: Occurrence, peer: str) -> None:
        """Begins a new step, unless the exchange belongs to the same step as the previous one."""
        if self._last_step == (occurrence.step, peer):
            return
        self._last_step = occurrence.step, peer
        self._trains = self._trains or occurrence.exchange.name
        run = (occurrence.exchange.name, peer, occurrence.step.round)
        if run != self._run:
            self._end_run()
            self._run = run
        self._steps += 1

    def add(self, size: BundleSizes, parties: int, up: bool) -> None:
        """Adds a message to or from each of ``parties`` parties."""
        place = 0 if up else 1
        self._sums[place] += parties * size.message_bytes
        self._sums[2 + place] += parties * size.messages

    def finish(self) -> tuple[StepRun, ...]:
        """Returns all different runs, with the number of rounds for each."""
        self._end_run()
        is_main = {
            exchange: self._in_flight > 0 and exchange == self._trains
            for exchange, _, _ in self._counts
        }
        return tuple(
            StepRun(
                exchange=exchange,
                trains=is_main[exchange],
                times=times,
                steps=steps,
                in_flight=self._in_flight if is_main[exchange] else 1,
                parts=self._parts if is_main[exchange] else 1,
                up_bytes=sums[0],
                down_bytes=sums[1],
                up_messages=sums[2],
                down_messages=sums[3],
            )
            for (exchange, steps, sums), times in self._counts.items()
        )

    def _end_run(self) -> None:
        if self._run is not None:
            self._counts[self._run[0], self._steps, tuple(self._sums)] += 1
        self._run, self._steps, self._sums = None, 0, [0, 0, 0, 0]
