"""Renders a page as HTML: one file without scripts and without external resources."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import mean, stdev

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vfl.summary.table import format_size, sort_phases
from vfl_common.files import private_file
from vfl_common.summary import Arithmetic, ExchangeSummary, Summary
from vfl_common.text import clean, list_names
from vfl_lab.report.quality import (
    DELONG,
    Decisions,
    Estimate,
    SplitPredictions,
    Tenth,
    count_confusions,
)

# {metric: (name, meaning)}
NAMES = {
    "auc": ("AUC", "how often a positive row scores above a negative one; 0.5 is guessing"),
    "average_precision": ("average precision", "the area under precision and recall"),
    "ks": ("KS", "the largest distance of the two classes' scores"),
    "gini": ("Gini", "2 AUC - 1; 0 is guessing"),
    "accuracy": ("accuracy", "the share of right decisions"),
    "f1": ("F1", "the balance of precision and recall"),
    "precision": ("precision", "the share of the chosen rows that are positive"),
    "recall": ("recall", "the share of the positive rows that are chosen"),
    "brier": ("Brier score", "the mean squared error of the probabilities; lower is better"),
    "log_loss": ("log loss", "the mean negative log likelihood of the labels; lower is better"),
    "rmse": ("RMSE", "the root of the mean squared error, in the label's unit; lower is better"),
    "mae": ("MAE", "the mean absolute error, in the label's unit; lower is better"),
    "r2": ("R²", "the share of the label's variance that is explained"),
    "bias": ("mean error", "the mean of predicted minus true; 0 is best"),
    "c_index": ("C index", "how often the row with more risk comes first; 0.5 is guessing"),
    "ndcg": ("NDCG", "how well each query's rows are ordered; 1 is best"),
}


@dataclass(frozen=True)
class PageTable:
    """A table with a header for each column and each row.

    ``words``: the indices of the columns with text, which are aligned left. ``note``: a sentence
    below the table.
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
class PageSection:
    """A section of a page. ``pictures`` are shown side by side."""

    key: str
    title: str
    text: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    pictures: list[object] = field(default_factory=list)
    tables: list[PageTable] = field(default_factory=list)
    commands: list[tuple[str, str]] = field(default_factory=list)

    @property
    def there(self) -> bool:
        """Whether the section has any content."""
        return bool(self.text or self.pictures or self.tables or self.commands or self.warnings)


def get_metric_name(metric: str) -> str:
    """Returns the display name of a metric."""
    return NAMES.get(metric, (metric, ""))[0]


def format_metric(number: float) -> str:
    """Formats a metric with four decimals, or with four digits from 10 on."""
    if number != number:
        return "–"
    return f"{number:.4f}" if abs(number) < 10 else f"{number:,.4g}"


def format_mean_and_sd(values: Sequence[float]) -> str:
    """Formats the mean of a metric and its standard deviation alike; – without values."""
    if not values:
        return "–"
    middle = mean(values)
    form = ".4f" if abs(middle) < 10 else ",.4g"
    return format_metric(middle) + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def format_share(part: float) -> str:
    """Formats a share in percent."""
    return "–" if part != part else f"{100 * part:.1f} %"


def format_interval(estimate: Estimate, sign: str = "") -> str:
    """Formats an interval; '' without one."""
    if estimate.low != estimate.low or abs(estimate.high) == float("inf"):
        return ""
    if abs(estimate.value) < 10:
        return f"{estimate.low:{sign}.3f} to {estimate.high:{sign}.3f}"
    return f"{estimate.low:{sign},.4g} to {estimate.high:{sign},.4g}"


def make_quality_table(
    by_split: Mapping[str, Mapping[str, Estimate]], predictions: Mapping[str, SplitPredictions]
) -> PageTable:
    """Returns a row for each metric with its value and interval in each split."""
    names = list(dict.fromkeys(name for estimates in by_split.values() for name in estimates))
    heads = ["metric"]
    for split in by_split:
        heads += [f"{split} ({len(predictions[split]):,} rows)", "95 % interval"]
    rows = []
    for name in names:
        row = [get_metric_name(name)]
        for estimates in by_split.values():
            one = estimates.get(name)
            row += [format_metric(one.value), format_interval(one)] if one is not None else ["", ""]
        rows.append([*row, NAMES.get(name, ("", ""))[1]])
    ways = {one.how for estimates in by_split.values() for one in estimates.values()}
    note = (
        "Intervals of AUC by DeLong's method, others by a bootstrap over rows or the influence of "
        "each row."
        if DELONG in ways
        else "Intervals by a bootstrap over rows, or by the influence of each row on the metric."
    )
    return PageTable(
        "Metrics by split", [*heads, "meaning"], rows, frozenset({0, len(heads)}), note
    )


def make_run_metrics_table(summary: Summary, splits: Sequence[str]) -> PageTable:
    """Returns the metrics that the run has reported."""
    names = list(dict.fromkeys(name for named in summary.metrics.values() for name in named))
    rows = [
        [split, *(format_metric(summary.metrics[split].get(name, float("nan"))) for name in names)]
        for split in splits
    ]
    return PageTable("Metrics reported by the run", ["rows", *map(get_metric_name, names)], rows)


def make_threshold_table(
    lines: Sequence[tuple[str, Decisions]], classes: Sequence[str]
) -> PageTable:
    """Returns the decisions of thresholds, one row for each."""
    heads = ["threshold", "value", f"right: {classes[1]}", f"wrong: {classes[1]}"]
    heads += [f"missed: {classes[1]}", f"right: {classes[0]}", "precision", "recall", "F1"]
    rows = [
        [
            name,
            f"{decisions.threshold:.4f}",
            *(
                f"{count:,}"
                for count in (decisions.hits, decisions.false, decisions.missed, decisions.left)
            ),
            *(
                format_metric(metric)
                for metric in (decisions.precision, decisions.recall, decisions.f1)
            ),
        ]
        for name, decisions in lines
    ]
    return PageTable("Decisions by threshold (confusion matrices)", heads, rows)


def make_lift_table(groups: Sequence[Tenth], positive: str) -> PageTable:
    """Returns the tenths of the rows by score."""
    rows = [
        [
            f"{place}",
            f"{group.rows:,}",
            f"{group.min_score:.4f}",
            f"{group.hits:,}",
            format_share(group.rate),
            format_share(group.gain),
            f"{group.lift:.2f}",
        ]
        for place, group in enumerate(groups, 1)
    ]
    heads = [
        "tenth",
        "rows",
        "lowest score",
        positive,
        "share",
        "share of all so far",
        "lift so far",
    ]
    return PageTable("Gain and lift: rows by score, the highest first", heads, rows)


def make_class_tables(predictions: SplitPredictions) -> list[PageTable]:
    """Returns a table of the classes, and the confusion matrix unless it is too large."""
    cells = count_confusions(predictions)
    rows = []
    for at, name in enumerate(predictions.classes):
        true, decided, hits = cells[at].sum(), cells[:, at].sum(), cells[at, at]
        rows.append(
            [
                name,
                f"{true:,}",
                f"{decided:,}",
                format_metric(hits / decided if decided else float("nan")),
                format_metric(hits / true if true else float("nan")),
                format_metric(2 * hits / (true + decided) if true + decided else float("nan")),
            ]
        )
    heads = ["class", "true rows", "decided rows", "precision", "recall", "F1"]
    tables = [PageTable("Each class", heads, rows)]
    if len(predictions.classes) <= 30:
        matrix = [
            [name, *(f"{cell:,}" for cell in row)]
            for name, row in zip(predictions.classes, cells, strict=True)
        ]
        tables.append(
            PageTable(
                "Confusion: true classes down, decided across",
                ["true", *predictions.classes],
                matrix,
            )
        )
    return tables


def make_bytes_table(summary: Summary, phases: Sequence[str]) -> PageTable:
    """Returns message bytes by party and direction, with a column for each phase."""
    order = sort_phases(summary, phases)
    rows = []
    for party in summary.parties:
        for direction in ("sent", "received"):
            own = [
                link
                for link in summary.bytes.by_link
                if (link.sender if direction == "sent" else link.receiver) == party.name
            ]
            counts = [
                sum(link.message_bytes for link in own if link.phase == phase) for phase in order
            ]
            tensors = sum(link.payload_bytes for link in own)
            cells = [
                format_size(count) if count else "–" for count in (*counts, sum(counts), tensors)
            ]
            rows.append([f"{party.name} {direction}", *cells])
    heads = ["party", *order, "all", "of which tensors"]
    return PageTable(
        "Bytes by party and phase",
        heads,
        rows,
        note="Control: sessions with the server. TLS is not counted.",
    )


def make_seconds_table(summary: Summary) -> PageTable:
    """Returns the seconds of each party and phase."""
    rows = [
        [
            f"{party.name}: {time.phase}",
            f"{time.steps:,}",
            *(f"{s:.2f}" for s in (time.compute_s, time.encode_s, time.decode_s, time.wait_s)),
            f"{time.busy_s + time.wait_s:.2f}",
        ]
        for party in summary.parties
        for time in party.times
    ]
    heads = ["party and phase", "steps", "compute", "encode", "decode", "wait", "all"]
    return PageTable(
        "Seconds by party and phase",
        heads,
        rows,
        note="Wait: waiting for the other parties and the network.",
    )


def make_parties_table(summary: Summary) -> PageTable:
    """Returns the processes of the run."""
    rows = [
        [
            party.name,
            party.role,
            f"{party.rows:,}" if party.rows else "–",
            party.device or "–",
            party.device_name or "–",
            party.version or "–",
            f"{party.wall_s:.1f}" if party.role != "server" else "–",
        ]
        for party in summary.parties
    ]
    heads = ["name", "role", "rows", "device", "hardware", "version", "seconds"]
    return PageTable("Who took part", heads, rows, frozenset({0, 1, 3, 4, 5}))


def make_arithmetic_tables(of: Mapping[str, Arithmetic | None]) -> list[PageTable]:
    """Returns tables of the hardware and software of the parties; empty if unknown.

    ``of``: {party: its arithmetic}.
    """
    rows = [
        [
            name,
            computed.processor,
            computed.instructions,
            f"{computed.threads}",
            computed.device,
            list_names([f"{library} {number}" for library, number in computed.libraries.items()]),
            list_names([f"{setting}={to}" for setting, to in computed.settings.items()]) or "–",
        ]
        for name, computed in of.items()
        if computed is not None
    ]
    changes = [
        [name, change.checkpoint, "; ".join(change.differs)]
        for name, computed in of.items()
        for change in (computed.changes if computed is not None else [])
    ]
    heads = ["name", "processor", "instruction set", "threads", "device", "versions", "settings"]
    tables = [
        PageTable(
            "Hardware and software of the parties", heads, rows, frozenset({0, 1, 2, 4, 5, 6})
        )
    ]
    if changes:
        note = (
            "A run that is resumed with different arithmetic equals an uninterrupted one up to "
            "rounding, not bit for bit."
        )
        heads = ["name", "resumed from", "what differed"]
        tables.append(
            PageTable(
                "Resumes with different arithmetic", heads, changes, frozenset({0, 1, 2}), note
            )
        )
    return tables if rows else []


def make_exchange_tables(summary: Summary) -> list[PageTable]:
    """Returns a table for each party of the exchanges that its phases declare, with their
    counts.
    """
    return [
        table
        for party in summary.parties
        if party.role != "server"
        for table in [_make_exchange_table(summary, party.name, party.role)]
        if table.rows
    ]


def _make_exchange_table(summary: Summary, name: str, role: str) -> PageTable:
    whose = {name, "every party", *(["passive parties"] if role == "passive" else [])}
    # Messages are counted by phase and kind.
    by_kind: dict[tuple[str, str], list[ExchangeSummary]] = {}
    for exchange in summary.exchanges:
        if exchange.sender in whose:
            by_kind.setdefault(
                (exchange.phase, exchange.sent.split(" ")[0].rstrip(":")), []
            ).append(exchange)
    rows = []
    for (phase, kind), exchanges in by_kind.items():
        links = [
            link
            for link in summary.bytes.by_link
            if (link.sender, link.phase, link.kind) == (name, phase, kind)
        ]
        rows.append(
            [
                f"{phase}: {_join_unique(one.exchange for one in exchanges)}",
                _join_unique(one.receiver for one in exchanges),
                _join_unique(
                    ", ".join(filter(None, (one.sent, one.about_labels))) for one in exchanges
                ),
                _join_unique(describe_defence(one) for one in exchanges),
                _join_unique(one.when for one in exchanges),
                f"{sum(link.messages for link in links):,}" if links else "–",
                format_size(sum(link.message_bytes for link in links)) if links else "–",
            ]
        )
    heads = ["phase and exchange", "to", "what", "defence", "when", "messages", "bytes"]
    return PageTable(f"What left {name}", heads, rows, frozenset(range(5)))


def _join_unique(words: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(words))


def describe_defence(exchange: ExchangeSummary) -> str:
    """Returns the transforms of an exchange before sending; "none" without one."""
    steps = [
        step
        for step in exchange.chain.split(" -> ")
        if step not in ("identity", "allow all", "unchanged") and not step.startswith("policy: ")
    ]
    return "; ".join([*([exchange.how] if exchange.how else []), *steps]) or "none"


FILE = "report.html"
# Maximum number of characters of a name and of a sentence.
_LONGEST, _SENTENCE = 80, 1_000
# Maximum number of rows of a table.
_MAX_ROWS = 200


@dataclass
class ReportPage:
    """A page. ``lead``: sentences that summarize it."""

    title: str
    subtitle: str
    lead: list[str] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    parts: list[PageSection] = field(default_factory=list)
    made: str = ""


def render(page: ReportPage) -> str:
    """Returns the page as HTML. All texts are escaped, and cut if they are too long."""
    css = _read_style()
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    # The stylesheet is ours.
    return (
        _make_environment()
        .get_template("page.html")
        .render(
            page=page,
            parts=[part for part in page.parts if part.there],
            css=Markup(css),  # noqa: S704
            policy=policy,
        )
    )


def write(page: ReportPage, path: Path) -> Path:
    """Writes a page that only its owner can read, because it shows scores of people.

    Returns its path. Raises InputError.
    """
    with private_file(path) as file:
        file.write(render(page).encode())
    return path


def cut_word(text: object) -> str:
    """Returns a name or a cell as one line of printable characters of limited length."""
    return _cut(str(text), _LONGEST)


def cut_sentence(text: object) -> str:
    """Returns a sentence as one line of printable characters of limited length."""
    return _cut(str(text), _SENTENCE)


def _cut(text: str, max_characters: int) -> str:
    cleaned = clean(text, max_characters + 1)
    return cleaned if len(cleaned) <= max_characters else f"{cleaned[: max_characters - 1]}…"


@cache
def _make_environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("vfl_lab.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["most"] = _MAX_ROWS
    environment.filters |= {"word": cut_word, "sentence": cut_sentence}
    return environment


@cache
def _read_style() -> str:
    return files("vfl_lab.report").joinpath("templates/page.css").read_text(encoding="utf-8")
