"""The result of a rehearsal: the figures of each attack over seeds, and the metric and bytes of the
runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from vfl_common.text import list_names

if TYPE_CHECKING:
    from vfl_leaks.rehearsal import Played
    from vfl_leaks.scene import Figure, Shown
    from vfl_leaks.wiretap import MessageSizes, Times

REHEARSAL = (
    "A rehearsal: the data of all parties were on this machine. Each figure is a lower bound: "
    "another attack may read more. Chance: the same attack on shuffled labels, or a constant guess."
)


# A copy of the constant in ``vfl_leaks.scene``, which imports torch.
ALL_EPOCHS = "all epochs"
# Units for which a lower value is a larger leak.
ERRORS = frozenset({"MSE"})


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds; ``values``: one for each seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.values)

    @property
    def sd(self) -> float:
        """The standard deviation over seeds; 0 for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Returns the spread of the values that are not None; None if there are no such values."""
        numbers = tuple(value for value in values if value is not None)
        return cls(numbers) if numbers else None

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + (f" ± {self.sd:.3f}" if len(self.values) > 1 else "")


@dataclass(frozen=True)
class AttackLine:
    """One figure of one attack over all seeds; see ``vfl_leaks.scene.Figure``."""

    attack: str
    attacker: str
    of: str
    knows: str
    unit: str
    value: Spread
    high: Spread | None = None
    chance: Spread | None = None
    chance_high: Spread | None = None
    baselines: Mapping[str, Spread] = field(default_factory=dict)
    batches: int = 0
    skipped: int = 0
    place: str = ""
    detail: bool = False

    @property
    def asset(self) -> tuple[str, ...]:
        """Identifies the attack, the attacker, the target, the knowledge and the unit, without the
        exchange.
        """
        knows = (
            self.knows if not self.place else ALL_EPOCHS if self.knows.endswith(ALL_EPOCHS) else ""
        )
        return self.attack, self.attacker, self.of, knows, self.unit

    @property
    def is_error(self) -> bool:
        """Whether a lower value is a larger leak."""
        return self.unit in ERRORS

    @property
    def excess(self) -> float:
        """The leak on a scale from the value without any message (0) to a complete leak (1)."""
        everything = 0.0 if self.is_error else 1.0
        return (
            0.0
            if self.floor == everything
            else (self.value.mean - self.floor) / (everything - self.floor)
        )

    @property
    def floor(self) -> float:
        """The value without any message: the maximum of chance, all baselines and 0. For an error,
        it is the minimum of chance and the baselines.
        """
        known = [
            spread.mean for spread in (self.chance, *self.baselines.values()) if spread is not None
        ]
        return min(known, default=self.value.mean) if self.is_error else max(0.0, *known, 0.0)

    def leaks_more(self, other: AttackLine) -> bool:
        """Whether this line reads more than another line of the same unit."""
        value, other_value = self.value.mean, other.value.mean
        return value < other_value if self.is_error else value > other_value


@dataclass(frozen=True, eq=False)
class Drawing:
    """Images that an attack has reconstructed, with the attack, the attacker and the exchange."""

    attack: str
    attacker: str
    place: str
    shown: Shown


@dataclass(frozen=True)
class Rehearsed:
    """The result of one recipe.

    ``utility``, ``metric``: the values of a metric over seeds, and its name; on the test rows if
    there are any. ``sizes``, ``times``: the sizes and times of the messages of the last seed, and
    what they reveal to any observer of the network. ``gaps``: a sentence for each defence that some
    exchanges lack, and for phases that no attack supports. ``every``: one of this many rounds was
    recorded. ``drawings``: images of the last seed to draw, from the exchange that leaks most of
    each party.
    """

    name: str
    seeds: tuple[int, ...]
    metric: str
    utility: Spread | None
    payload_bytes: int
    lines: tuple[AttackLine, ...]
    notes: tuple[str, ...] = ()
    sizes: tuple[MessageSizes, ...] = ()
    gaps: tuple[str, ...] = ()
    every: int = 1
    times: tuple[Times, ...] = ()
    drawings: tuple[Drawing, ...] = ()

    @property
    def worst(self) -> tuple[AttackLine, ...]:
        """The line of each asset from the exchange with the largest leak."""
        worst: dict[tuple[str, ...], AttackLine] = {}
        for line in self.lines:
            before = worst.get(line.asset)
            if before is None or line.leaks_more(before):
                worst[line.asset] = line
        return tuple(worst.values())

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """A sentence for each asset that several exchanges leak, with the figure of each
        exchange.
        """
        by_asset: dict[tuple[str, ...], list[AttackLine]] = {}
        for line in self.lines:
            if line.place and not line.detail:
                by_asset.setdefault(line.asset, []).append(line)
        return tuple(
            ", ".join(
                filter(None, (lines[0].attack, lines[0].of, lines[0].asset[3], "by exchange: "))
            )
            + ", ".join(f"{line.place} {line.unit} {line.value}" for line in lines)
            for lines in by_asset.values()
            if len(lines) > 1
        )


def rank_assets(results: Sequence[Rehearsed]) -> list[tuple[str, ...]]:
    """Returns the assets of all recipes without details, sorted by the worst leak in any recipe."""
    excess: dict[tuple[str, ...], float] = {}
    for line in (line for result in results for line in result.worst if not line.detail):
        excess[line.asset] = max(line.excess, excess.get(line.asset, line.excess))
    return sorted(excess, key=lambda asset: -excess[asset])


def as_columns(results: Sequence[Rehearsed]) -> dict[str, list[Any]]:
    """Returns a row for each figure, as columns."""
    rows = [
        {
            "recipe": result.name,
            result.metric or "metric": result.utility.mean if result.utility else None,
            "payload bytes": result.payload_bytes,
            "attack": line.attack,
            "attacker": line.attacker,
            "of": line.of,
            "from": line.place,
            "knows": line.knows,
            "unit": line.unit,
            "leak": line.value.mean,
            "leak sd": line.value.sd,
            "95 %": line.high.mean if line.high else None,
            "chance": line.chance.mean if line.chance else None,
            "chance 95 %": line.chance_high.mean if line.chance_high else None,
            **{f"baseline: {name}": spread.mean for name, spread in line.baselines.items()},
        }
        for result in results
        for line in result.lines
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def as_json(results: Sequence[Rehearsed]) -> dict[str, Any]:
    """Returns all values of all seeds."""
    return {"rehearsal": REHEARSAL, "recipes": [_to_plain(result) for result in results]}


def merge_seeds(
    played: Sequence[Sequence[Played]],
) -> tuple[tuple[AttackLine, ...], tuple[str, ...]]:
    """Returns the lines over all seeds, and a note for each attack that could not be played.

    ``played``: the attacks of each seed.
    """
    figures_of: dict[tuple[str, str, str, str, str, str], list[Figure]] = {}
    notes: dict[str, None] = {}
    # {(reason, attacker): attacks}
    refused: dict[tuple[str, str], list[str]] = {}
    for attacks in played:
        for attack in attacks:
            if attack.why_not:
                names = refused.setdefault((attack.why_not, attack.attacker), [])
                names += [attack.attack] if attack.attack not in names else []
            notes |= dict.fromkeys(
                f"{attack.attack}: {figure.note}" for figure in attack.figures if figure.note
            )
            for figure in attack.figures:
                key = (
                    attack.attack,
                    attack.attacker,
                    figure.of,
                    figure.knows,
                    figure.unit,
                    figure.place,
                )
                figures_of.setdefault(key, []).append(figure)
    lines = tuple(
        AttackLine(
            *key[:-1],
            Spread(tuple(figure.value for figure in figures)),
            Spread.of(figure.high for figure in figures),
            Spread.of(figure.chance for figure in figures),
            Spread.of(figure.chance_high for figure in figures),
            {
                name: Spread(
                    tuple(figure.baselines[name] for figure in figures if name in figure.baselines)
                )
                for name in dict.fromkeys(name for figure in figures for name in figure.baselines)
            },
            sum(figure.batches for figure in figures),
            sum(figure.skipped for figure in figures),
            key[-1],
            figures[0].detail,
        )
        for key, figures in figures_of.items()
    )
    return lines, (*notes, *_describe_refusals(refused))


def collect_drawings(played: Sequence[Played]) -> tuple[Drawing, ...]:
    """Returns the images of one seed to draw: for each attack, attacker and party the largest
    leak.
    """
    worst: dict[tuple[str, str, str], tuple[float, Drawing]] = {}
    for attack in played:
        for figure in attack.figures:
            if figure.shown is not None:
                key = (attack.attack, attack.attacker, figure.shown.party)
                drawing = Drawing(attack.attack, attack.attacker, figure.place, figure.shown)
                if key not in worst or figure.value > worst[key][0]:
                    worst[key] = (figure.value, drawing)
    return tuple(drawing for _, drawing in worst.values())


def _describe_refusals(refused: Mapping[tuple[str, str], Sequence[str]]) -> Iterator[str]:
    """Yields one sentence for all attacks and attackers that were not played for the same
    reason.
    """
    attackers: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (why, attacker), attacks in refused.items():
        attackers.setdefault((why, tuple(attacks)), []).append(attacker)
    for (why, attacks), names in attackers.items():
        yield (
            f"{list_names(attacks)} by {list_names(names)} "
            f"{'was' if len(attacks) == 1 else 'were'} not played: {why}"
        )


def _to_plain(value: Any) -> Any:
    if isinstance(value, Spread):
        return {"mean": value.mean, "sd": value.sd, "values": list(value.values)}
    if is_dataclass(value):
        names = [field_.name for field_ in fields(value) if field_.name != "drawings"]
        return {name: _to_plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {name: _to_plain(item) for name, item in value.items()}
    return [_to_plain(item) for item in value] if isinstance(value, tuple) else value
