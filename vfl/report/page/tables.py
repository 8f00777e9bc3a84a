"""The tables of a page: plain words and numbers, which the template escapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev

from vfl.report.quality.curves import Decisions, Tenth, confusion
from vfl.report.quality.kept import KeptRows
from vfl.report.quality.measures import DELONG, Estimate
from vfl.report.table import in_order, size
from vfl_common.summary import Arithmetic, ExchangeSummary, Summary
from vfl_common.text import listed

# {metric: (name, what it means, in plain words)}.
NAMES = {
    "auc": ("AUC", "how often a positive row scores above a negative one; 0.5 is guessing"),
    "average_precision": ("average precision", "the area under precision and recall"),
    "ks": ("KS", "the largest distance of the two classes' scores"),
    "gini": ("Gini", "2 AUC - 1; 0 is guessing"),
    "accuracy": ("accuracy", "the share of right decisions"),
    "f1": ("F1", "the balance of precision and recall"),
    "precision": ("precision", "the share of the chosen rows that are positive"),
    "recall": ("recall", "the share of the positive rows that are chosen"),
    "brier": ("Brier score", "the mean squared error of the probabilities; less is better"),
    "log_loss": ("log loss", "how surprising the truth is to the model; less is better"),
    "rmse": ("RMSE", "the root of the mean squared error, in the label's unit; less is better"),
    "mae": ("MAE", "the mean absolute error, in the label's unit; less is better"),
    "r2": ("R²", "the share of the label's variance that is explained"),
    "bias": ("mean error", "predicted minus true, in the mean; 0 is best"),
    "c_index": ("C index", "how often the row with more risk comes first; 0.5 is guessing"),
    "ndcg": ("NDCG", "how well each query's rows are ordered; 1 is best"),
}


@dataclass(frozen=True)
class Table:
    """A table with a header for each column and each row. ``words``: the columns, from 0, whose
    cells are words and stand left. ``note``: a sentence below it.
    """

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[int] = frozenset({0})
    note: str = ""


@dataclass(frozen=True)
class Tile:
    """A large number at the top of a page."""

    name: str
    value: str
    note: str = ""
    tone: str = ""


@dataclass
class Part:
    """A section of a page. ``pictures`` are drawn beside each other."""

    key: str
    title: str
    text: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    pictures: list[object] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    commands: list[tuple[str, str]] = field(default_factory=list)

    @property
    def there(self) -> bool:
        return bool(self.text or self.pictures or self.tables or self.commands or self.warnings)


def name_of(metric: str) -> str:
    return NAMES.get(metric, (metric, ""))[0]


def value(number: float) -> str:
    """Writes a metric: four digits behind the point of a share, four in all of others."""
    if number != number:
        return "–"
    return f"{number:.4f}" if abs(number) < 10 else f"{number:,.4g}"


def mean_and_sd(values: Sequence[float]) -> str:
    """Writes the mean of a metric, and its standard deviation in the same way; – if there is no
    value.
    """
    if not values:
        return "–"
    middle = mean(values)
    form = ".4f" if abs(middle) < 10 else ",.4g"
    return value(middle) + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def share(part: float) -> str:
    """Writes a share in percent."""
    return "–" if part != part else f"{100 * part:.1f} %"


def between(found: Estimate, sign: str = "") -> str:
    """Words an interval; '' if there is none."""
    if found.low != found.low or abs(found.high) == float("inf"):
        return ""
    if abs(found.value) < 10:
        return f"{found.low:{sign}.3f} to {found.high:{sign}.3f}"
    return f"{found.low:{sign},.4g} to {found.high:{sign},.4g}"


def quality(by_split: Mapping[str, Mapping[str, Estimate]], kept: Mapping[str, KeptRows]) -> Table:
    """Returns a row for each metric, and for each split its value and interval."""
    names = list(dict.fromkeys(name for found in by_split.values() for name in found))
    heads = ["metric"]
    for split in by_split:
        heads += [f"{split} ({len(kept[split]):,} rows)", "95 % interval"]
    rows = []
    for name in names:
        row = [name_of(name)]
        for found in by_split.values():
            one = found.get(name)
            row += [value(one.value), between(one)] if one is not None else ["", ""]
        rows.append([*row, NAMES.get(name, ("", ""))[1]])
    ways = {one.how for found in by_split.values() for one in found.values()}
    how = "Intervals: AUC by DeLong's method; the others" if DELONG in ways else "Intervals"
    note = f"{how} by a bootstrap over rows, or by the influence of each row on the metric."
    return Table(
        "Metrics by split", [*heads, "what it means"], rows, frozenset({0, len(heads)}), note
    )


def reported(summary: Summary, splits: Sequence[str]) -> Table:
    """Returns the metrics that the run itself has reported."""
    names = list(dict.fromkeys(name for named in summary.metrics.values() for name in named))
    rows = [
        [split, *(value(summary.metrics[split].get(name, float("nan"))) for name in names)]
        for split in splits
    ]
    return Table("Metrics that the run has reported", ["rows", *map(name_of, names)], rows)


def decided(lines: Sequence[tuple[str, Decisions]], classes: Sequence[str]) -> Table:
    """Returns what thresholds decide, a row each."""
    heads = ["threshold", "above", f"right: {classes[1]}", f"wrong: taken for {classes[1]}"]
    heads += [f"missed: {classes[1]}", f"right: {classes[0]}", "precision", "recall", "F1"]
    rows = [
        [
            name,
            f"{found.threshold:.4f}",
            *(f"{each:,}" for each in (found.hits, found.false, found.missed, found.left)),
            *(value(each) for each in (found.precision, found.recall, found.f1)),
        ]
        for name, found in lines
    ]
    return Table("Decisions by threshold (confusion matrices)", heads, rows)


def lifts(found: Sequence[Tenth], positive: str) -> Table:
    """Returns the tenths of the rows by score."""
    rows = [
        [
            f"{place}",
            f"{each.rows:,}",
            f"{each.least:.4f}",
            f"{each.hits:,}",
            share(each.rate),
            share(each.gain),
            f"{each.lift:.2f}",
        ]
        for place, each in enumerate(found, 1)
    ]
    heads = [
        "tenth",
        "rows",
        "lowest score",
        positive,
        "share",
        "found of all so far",
        "lift so far",
    ]
    return Table("Gain and lift: rows by score, the highest first", heads, rows)


def by_class(kept: KeptRows) -> list[Table]:
    """Returns a line for each class, and the confusion matrix if it can be read."""
    cells = confusion(kept)
    rows = []
    for at, name in enumerate(kept.classes):
        true, said, hits = cells[at].sum(), cells[:, at].sum(), cells[at, at]
        rows.append(
            [
                name,
                f"{true:,}",
                f"{said:,}",
                value(hits / said if said else float("nan")),
                value(hits / true if true else float("nan")),
                value(2 * hits / (true + said) if true + said else float("nan")),
            ]
        )
    heads = ["class", "true rows", "decided rows", "precision", "recall", "F1"]
    found = [Table("Each class", heads, rows)]
    if len(kept.classes) <= 30:
        matrix = [
            [name, *(f"{cell:,}" for cell in row)]
            for name, row in zip(kept.classes, cells, strict=True)
        ]
        found.append(
            Table("Confusion: true classes down, decided across", ["true", *kept.classes], matrix)
        )
    return found


def by_phase(summary: Summary, phases: Sequence[str]) -> Table:
    """Returns message bytes by party and direction, a column for each phase."""
    order = in_order(summary, phases)
    rows = []
    for party in summary.parties:
        for direction in ("sent", "received"):
            own = [
                link
                for link in summary.bytes.by_link
                if (link.sender if direction == "sent" else link.receiver) == party.name
            ]
            each = [
                sum(link.message_bytes for link in own if link.phase == phase) for phase in order
            ]
            tensors = sum(link.payload_bytes for link in own)
            cells = [size(count) if count else "–" for count in (*each, sum(each), tensors)]
            rows.append([f"{party.name} {direction}", *cells])
    heads = ["party", *order, "all", "tensors of it"]
    return Table(
        "Bytes by party and phase",
        heads,
        rows,
        note="Control: sessions with the server. TLS is not counted.",
    )


def seconds(summary: Summary) -> Table:
    """Returns the seconds of each party and phase."""
    rows = [
        [
            f"{party.name}: {each.phase}",
            f"{each.steps:,}",
            *(f"{s:.2f}" for s in (each.compute_s, each.encode_s, each.decode_s, each.wait_s)),
            f"{each.busy_s + each.wait_s:.2f}",
        ]
        for party in summary.parties
        for each in party.times
    ]
    heads = ["party and phase", "steps", "compute", "encode", "decode", "wait", "all"]
    return Table(
        "Seconds by party and phase",
        heads,
        rows,
        note="Wait: for the other parties and the network.",
    )


def parties(summary: Summary) -> Table:
    """Returns the processes of the run."""
    rows = [
        [
            each.name,
            each.role,
            f"{each.rows:,}" if each.rows else "–",
            each.device or "–",
            each.device_name or "–",
            each.version or "–",
            f"{each.wall_s:.1f}" if each.role != "server" else "–",
        ]
        for each in summary.parties
    ]
    heads = ["name", "role", "rows held", "device", "hardware", "version", "seconds"]
    return Table("Who took part", heads, rows, frozenset({0, 1, 3, 4, 5}))


def arithmetic(of: Mapping[str, Arithmetic | None]) -> list[Table]:
    """Returns with what parties have computed, {party: it}; none if no party says so."""
    rows = [
        [
            name,
            each.processor,
            each.instructions,
            f"{each.threads}",
            each.device,
            listed([f"{library} {number}" for library, number in each.libraries.items()]),
            listed([f"{setting}={to}" for setting, to in each.settings.items()]) or "–",
        ]
        for name, each in of.items()
        if each is not None
    ]
    changes = [
        [name, change.checkpoint, "; ".join(change.differs)]
        for name, each in of.items()
        for change in (each.changes if each is not None else [])
    ]
    heads = ["name", "processor", "instruction set", "threads", "device", "versions", "settings"]
    found = [Table("What the parties computed with", heads, rows, frozenset({0, 1, 2, 4, 5, 6}))]
    if changes:
        note = (
            "A run that is resumed with other arithmetic equals an undisturbed one to rounding, "
            "and not bit for bit."
        )
        heads = ["name", "resumed from", "what differed"]
        found.append(
            Table("Resumes with other arithmetic", heads, changes, frozenset({0, 1, 2}), note)
        )
    return found if rows else []


def left(summary: Summary) -> list[Table]:
    """Returns what left each party: the exchanges that its phases declare, and how often."""
    return [
        table
        for party in summary.parties
        if party.role != "server"
        for table in [_left(summary, party.name, party.role)]
        if table.rows
    ]


def _left(summary: Summary, name: str, role: str) -> Table:
    whose = {name, "every party", *(["passive parties"] if role == "passive" else [])}
    # What crosses is counted by phase and kind.
    found: dict[tuple[str, str], list[ExchangeSummary]] = {}
    for each in summary.exchanges:
        if each.sender in whose:
            found.setdefault((each.phase, each.sent.split(" ")[0].rstrip(":")), []).append(each)
    rows = []
    for (phase, kind), exchanges in found.items():
        links = [
            link
            for link in summary.bytes.by_link
            if (link.sender, link.phase, link.kind) == (name, phase, kind)
        ]
        rows.append(
            [
                f"{phase}: {_each(one.exchange for one in exchanges)}",
                _each(one.receiver for one in exchanges),
                _each(", ".join(filter(None, (one.sent, one.about_labels))) for one in exchanges),
                _each(defence(one) for one in exchanges),
                _each(one.when for one in exchanges),
                f"{sum(link.messages for link in links):,}" if links else "–",
                size(sum(link.message_bytes for link in links)) if links else "–",
            ]
        )
    heads = ["phase and exchange", "to", "what", "defence", "when", "messages", "bytes"]
    return Table(f"What left {name}", heads, rows, frozenset(range(5)))


def _each(words: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(words))


def defence(each: ExchangeSummary) -> str:
    """Says what was done to tensors before they left."""
    steps = [
        step
        for step in each.chain.split(" -> ")
        if step not in ("identity", "allow all", "unchanged") and not step.startswith("policy: ")
    ]
    return "; ".join([*([each.how] if each.how else []), *steps]) or "none"
