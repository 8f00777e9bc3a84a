"""Prints the result of a run as tables, with privacy notes: possible label inference and feature
reconstruction, and encryption.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from vfl.measured import MEASURED, WHERE
from vfl.summary.reading import ProcessNotes
from vfl.summary.rounds import RoundLine
from vfl_common.bundle import CONTROL
from vfl_common.summary import (
    ARROW,
    ExchangeSummary,
    LinkBytes,
    SetQuality,
    Summary,
    Worth,
    describe_label_exposure,
    describe_linkage_exposure,
)
from vfl_common.text import clean, format_percent

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_SPLITS = ("train", "validation", "test")
# The phases that come before the phases of the recipe.
FIRST_PHASES = ("align", "open")
# Maximum number of sets of parties in a table. Four parties have 16 sets.
_MAX_SETS = 16
# The width of a table in characters if the output is not a terminal.
PIPE_WIDTH = 120
GLOSSARY = (
    "align: entity alignment. open: the parties compare their rows.\n"
    "payload: the tensors of a message. envelope: the rest of the message. kB = 1,000 bytes."
)


def format_size(count: int) -> str:
    """Formats a number of bytes with a decimal unit, such as ``1.25 MB``."""
    for factor, unit in _UNITS:
        if count >= factor:
            return (
                f"{count / factor:.3g} {unit}"
                if count < 1000 * factor
                else f"{count / factor:,.0f} {unit}"
            )
    return f"{count} B"


def uses_same_rows(used: Mapping[str, int]) -> bool:
    """Returns whether all parties use the same number of rows. ``used``: {party: rows}."""
    return len(set(used.values())) == 1


def print_tables(
    summary: Summary, phases: Sequence[str] = (), console: Console | None = None
) -> None:
    """Prints the tables of a run to ``console``, by default to standard output.

    ``phases``: The names of the phases in the order of the recipe.
    """
    (console or wide_console()).print(render(summary, phases))


def show_notes(notes: ProcessNotes) -> None:
    """Prints the records of one process about a run that has no summary: its ledger, and its last
    round if the run has not ended.
    """
    table = new_table(f"Messages counted by {notes.name}{' so far' if notes.unfinished else ''}")
    for heading in ("phase", "peer", "what", "direction"):
        table.add_column(heading)
    for heading in ("payload", "message bytes", "messages"):
        table.add_column(heading, justify="right")
    for entry in notes.entries:
        counts = (
            format_size(entry.payload_bytes),
            format_size(entry.message_bytes),
            f"{entry.messages:,}",
        )
        table.add_row(
            clean(entry.phase), clean(entry.peer), clean(entry.kind), entry.direction, *counts
        )
    words = f"\n{GLOSSARY}\ncontrol: the session with the server, and opening streams.\n"
    last_round = notes.last_round if notes.unfinished else None
    newest = [] if last_round is None else [Text(f"{_describe_round(last_round)}\n")]
    wide_console().print(Group(Text(), table, Text(words, "dim"), *newest))


def _describe_round(last: RoundLine) -> str:
    """Returns a line of text with the number and the metrics of a party's last finished round."""
    splits = [
        f"{clean(split)} {', '.join(f'{clean(name)} {value:.4g}' for name, value in named.items())}"
        for split, named in last.metrics.items()
        if named
    ]
    return (
        f"newest round: {last.round} of phase "
        f"{clean(last.phase)}{': ' if splits else ''}{'; '.join(splits)}"
    )


def wide_console(width: int = PIPE_WIDTH) -> Console:
    """Returns a console for standard output that has at least ``width`` characters per line if the
    output is not a terminal.
    """
    # Markup is off, because peers choose some of the texts.
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, width)
    return console


def render_html(tables: Group) -> str:
    """Renders tables as HTML, for a notebook."""
    out = io.StringIO()
    # With force_jupyter=False, rich does not also display the tables in the notebook.
    console = Console(record=True, width=PIPE_WIDTH, file=out, force_jupyter=False, markup=False)
    console.print(tables)
    return console.export_html(
        inline_styles=True, code_format="<pre style='line-height:1.2'>{code}</pre>"
    )


def render(summary: Summary, phases: Sequence[str] = ()) -> Group:
    """Returns all tables and notes of a run as one rich renderable."""
    order = sort_phases(summary, phases)
    parts: list[Text | Table] = [
        Text.assemble("\n", (summary.run_id, "bold"), f"\n{_describe_run(summary)}")
    ]
    if summary.privacy is not None:
        parts += [Text(f"\nDifferential privacy: {summary.privacy.statement}")]
    for table in (
        _make_metrics_table(summary),
        *_make_worth_tables(summary),
        _make_process_table(summary),
        _make_party_table(summary, order),
        _make_phase_table(summary, order),
    ):
        if table.row_count:
            parts += [Text(), table]
    if not summary.bytes.agrees:
        links = "; ".join(summary.bytes.disagreements)
        why = (
            " (a process was killed or stopped, and has lost its counts since its last checkpoint)"
            if _is_disturbed(summary)
            else ""
        )
        parts += [Text(f"\nThe two ends counted different bytes on: {links}{why}", "yellow")]
    for note in yield_protection_notes(summary):
        parts += [Text(f"\n{clean(note)}", "yellow")]
    for note in describe_exchanges(summary):
        parts += [Text(f"\n{clean(note)}", "yellow" if "NOT" in note else "")]
    without = ", without killed or stopped processes" if _is_disturbed(summary) else ""
    words = (
        f"{GLOSSARY}\ncontrol: sessions with the server, and opening streams. TCP: counted by the "
        f"kernel{without}."
    )
    parts += [Text(f"\n{words}", "dim")]
    return Group(*parts, Text())


def _is_disturbed(summary: Summary) -> bool:
    """Returns whether a process may have crashed during the run, so that its counts are too low."""
    return bool(
        summary.interruptions or summary.absences or any(party.returns for party in summary.parties)
    )


def sort_phases(summary: Summary, phases: Sequence[str] = ()) -> list[str]:
    """Returns the names of the phases with bytes in order: alignment, comparison of rows, the
    phases of the recipe, and control (the sessions with the server).
    """
    ordered = [*FIRST_PHASES, *phases]
    names = list(summary.bytes.by_phase)
    return sorted(
        names,
        key=lambda name: (
            name == CONTROL,
            ordered.index(name) if name in ordered else len(ordered),
        ),
    )


def _describe_run(summary: Summary) -> str:
    parts = [
        ", ".join(
            [
                summary.method,
                *([f"preset {summary.preset}"] if summary.preset else []),
                f"seed {summary.seed}",
            ]
        ),
        f"{summary.steps:,} steps",
        f"{summary.wall_s:.1f} s",
    ]
    rows_by_party = {party.name: party.rows for party in summary.parties if party.rows}
    if rows_by_party:
        used = {party.name: party.common_rows for party in summary.parties if party.rows}
        shares = ", ".join(
            f"{name} {format_percent(used[name], rows)} of {rows:,}"
            for name, rows in rows_by_party.items()
        )
        # With rows.partial the parties use different rows.
        what = f"{max(used.values()):,} common rows" if uses_same_rows(used) else "rows used"
        parts.append(f"{what} ({shares})")
    if summary.without:
        parts.append(f"trained without {', '.join(summary.without)} (joined too late)")
    missed_steps = Counter[str]()
    for absence in summary.absences:
        missed_steps[absence.party] += absence.steps
    parts += [f"{steps:,} steps without {party}" for party, steps in missed_steps.items()]
    if summary.interruptions:
        parts.append(_count(summary.interruptions, "interruption"))
    if summary.server_restarts:
        parts.append(_count(summary.server_restarts, "restart") + " of the server")
    for party in summary.parties:
        if party.skipped_rounds:
            parts.append(f"{_count(party.skipped_rounds, 'round')} skipped by {party.name}")
        if party.returns:
            parts.append(f"{_count(party.returns, 'return')} of {party.name}")
        if changes := party.arithmetic.changes if party.arithmetic is not None else []:
            parts.append(
                f"{_count(len(changes), 'resume')} of {party.name} with different arithmetic "
                f"(equal up to rounding from {changes[0].checkpoint} on)"
            )
    return " · ".join(parts)


def _count(count: int, what: str) -> str:
    """Returns ``1 interruption``, ``2 interruptions``, and so on."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def new_table(title: str, show_footer: bool = False) -> Table:
    """Returns an empty table in the style of the reports."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        show_footer=show_footer,
    )


def list_splits(summary: Summary) -> list[str]:
    """Returns the names of the splits that have metrics: train, validation, test, then others."""
    return sorted(
        summary.metrics,
        key=lambda name: (_SPLITS.index(name) if name in _SPLITS else len(_SPLITS), name),
    )


def _make_metrics_table(summary: Summary) -> Table:
    table = new_table("Metrics")
    table.add_column("rows")
    names = list(dict.fromkeys(name for named in summary.metrics.values() for name in named))
    for name in names:
        table.add_column(name, justify="right")
    for split in list_splits(summary):
        named = summary.metrics[split]
        table.add_row(split, *(f"{named[name]:.4g}" if name in named else "" for name in names))
    return table


def select_sets(worth: Worth) -> list[SetQuality]:
    """Returns the sets of parties to print, sorted by their quality on the test rows, best first.

    If there are many sets, only the empty set, each party alone, all parties but one, and all
    parties are returned.
    """
    largest = max((len(subset.parties) for subset in worth.subsets), default=0)
    subsets = worth.subsets
    if len(subsets) > _MAX_SETS:
        subsets = [
            subset for subset in subsets if len(subset.parties) in (0, 1, largest - 1, largest)
        ]

    def sort_key(subset: SetQuality) -> tuple[bool, float]:
        value = subset.test if subset.test is not None else subset.validation
        sign = 1 if worth.lower_is_better else -1
        return value is None, 0.0 if value is None else sign * value

    return sorted(subsets, key=sort_key)


def _make_worth_tables(summary: Summary) -> list[Table]:
    """Returns a table of the parties' contributions, and one of the quality of sets of parties."""
    worth = summary.worth
    if worth is None:
        return []
    how = f"{worth.permutations} sampled orders" if worth.permutations else "exact"
    lower = " (lower is better)" if worth.lower_is_better else ""
    values = new_table("Contribution of each party")
    values.add_column("party")
    values.add_column(f"adds to {worth.split} {worth.metric}{lower}", justify="right")
    values.add_column(f"standard error (Shapley values, {how})", justify="right")
    for name, share in worth.shapley.items():
        values.add_row(clean(name), f"{share.value:+.4f}", f"{share.error:.4f}")
    sets = new_table("Quality with subsets of the parties")
    sets.add_column(f"parties (absent ones: {clean(worth.absent)})")
    for split in ("validation", "test"):
        sets.add_column(f"{split} {worth.metric}", justify="right")
    for subset in select_sets(worth):
        names = ", ".join(clean(name) for name in subset.parties) or "none"
        sets.add_row(names, _format_value(subset.validation), _format_value(subset.test))
    return [values, sets]


def _format_value(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _make_process_table(summary: Summary) -> Table:
    table = new_table("Processes")
    gpus = any(party.peak_memory_bytes is not None for party in summary.parties)
    for heading in ("name", "role", "device", "hardware"):
        table.add_column(heading)
    for heading in ("pid", "steps", "seconds", *(["GPU memory"] if gpus else [])):
        table.add_column(heading, justify="right")
    for party in summary.parties:
        work = ("", "") if party.role == "server" else (f"{party.steps:,}", f"{party.wall_s:.1f}")
        peak = "" if party.peak_memory_bytes is None else format_size(party.peak_memory_bytes)
        row = (party.name, party.role, party.device, party.device_name, str(party.pid), *work)
        table.add_row(*row, *([peak] if gpus else []))
    return table


def _make_party_table(summary: Summary, phases: Sequence[str]) -> Table:
    """Returns a table with two lines for each party, sent and received: message bytes by phase,
    then the totals of message bytes, payload, and the bytes that the kernel counted.
    """
    table = new_table("Message bytes by party, direction and phase")
    table.add_column("party")
    table.add_column("direction")
    machines = summary.bytes.interfaces
    for heading in (
        *phases,
        "all",
        "payload",
        "on TCP",
        *(["on the interface"] if machines else []),
    ):
        table.add_column(heading, justify="right")
    links, tcp_bytes = summary.bytes.by_link, _sum_tcp(summary)
    for party in summary.parties:
        own_machine = [machine for machine in machines if machine.party == party.name]
        ends = (
            ("sent", [link for link in links if link.sender == party.name]),
            ("received", [link for link in links if link.receiver == party.name]),
        )
        for direction, own_links in ends:
            on_tcp = sum(
                count
                for pair, count in tcp_bytes.items()
                if pair[direction == "received"] == party.name
            )
            on_interface = sum(
                machine.sent_bytes if direction == "sent" else machine.received_bytes
                for machine in own_machine
            )
            table.add_row(
                party.name if direction == "sent" else "",
                direction,
                *(_format_count(sum(_list_message_bytes(own_links, phase))) for phase in phases),
                format_size(sum(link.message_bytes for link in own_links)),
                format_size(sum(link.payload_bytes for link in own_links)),
                _format_count(on_tcp),
                *([_format_count(on_interface)] if machines else []),
            )
    return table


def _list_message_bytes(links: Iterable[LinkBytes], phase: str) -> list[int]:
    return [link.message_bytes for link in links if link.phase == phase]


def _format_count(count: int) -> str:
    return format_size(count) if count else "–"


def _make_phase_table(summary: Summary, phases: Sequence[str]) -> Table:
    table = new_table("Bytes by phase, every message counted once", show_footer=True)
    total = summary.bytes.total
    envelope = total.message_bytes - total.payload_bytes
    table.add_column("phase", "all")
    table.add_column("payload", format_size(total.payload_bytes), justify="right")
    table.add_column("envelope", format_size(envelope), justify="right")
    table.add_column("message bytes", format_size(total.message_bytes), justify="right")
    table.add_column("messages", f"{total.messages:,}", justify="right")
    table.add_column("on TCP", _format_count(sum(_sum_tcp(summary).values())), justify="right")
    for phase in phases:
        count = summary.bytes.by_phase[phase]
        table.add_row(
            phase,
            format_size(count.payload_bytes),
            format_size(count.message_bytes - count.payload_bytes),
            format_size(count.message_bytes),
            f"{count.messages:,}",
            "",
        )
    return table


def _sum_tcp(summary: Summary) -> dict[tuple[str, str], int]:
    """Returns {(sender, receiver): bytes on TCP}.

    If the two ends of a connection counted differently, the larger count is used, because that end
    observed the connection longer.
    """
    totals: dict[tuple[str, str], int] = {}
    for count in summary.bytes.tcp:
        for key, bytes_seen in (
            ((count.party, count.peer), count.sent_bytes),
            ((count.peer, count.party), count.received_bytes),
        ):
            totals[key] = max(bytes_seen, totals.get(key, 0))
    return totals


# The number of filters of an undefended exchange. Sent by the active party: policy and codec.
# Received by the active party: only the codec.
_SENT_FILTERS, _RECEIVED_FILTERS = 2, 1
# The highest measured reconstruction of columns from split training, and from one upload without
# labels.
_TRAINING, _UPLOAD = (MEASURED["binary"][preset].columns for preset in ("none", "labels"))
_WHERE = "in our rehearsals on a public data set, not on yours"


def yield_protection_notes(summary: Summary) -> Iterator[str]:
    """Yields a note for each kind of tensor that an attack can exploit: encodings of rows,
    gradients without a defence, gradients with noise, and embeddings without a defence.

    Noise on gradients gets a note because attacks that average over all epochs can remove it.
    A regression has no note on gradients, because the label inference attacks infer classes.
    """
    active = {party.name for party in summary.parties if party.role == "active"}
    classes = any("accuracy" in named for named in summary.metrics.values())
    sent = [
        exchange
        for exchange in summary.exchanges
        if exchange.sender in active and exchange.sent.startswith("gradient dz ")
    ]
    received = [
        exchange
        for exchange in summary.exchanges
        if exchange.receiver in active and exchange.sent.startswith("embedding z ")
    ]
    gradients = _list_undefended(sent, _SENT_FILTERS)
    embeddings = _list_undefended(received, _RECEIVED_FILTERS)
    noisy = _join_phases(exchange for exchange in sent if _count_filters(exchange) > _SENT_FILTERS)
    if linkage := describe_linkage_exposure(summary.exchanges):
        yield linkage
    if classes and gradients:
        yield (
            f"Gradients of {gradients} leave without a defence: a passive party can infer the "
            f"labels from them (AUC 1.00 by direction {_WHERE}). Try vfl leaks."
        )
    if classes and noisy:
        yield (
            f"Gradients of {noisy} leave with noise: attacks that average over all epochs can "
            f"remove it (AUC 1.00 with Marvell noise {_WHERE}). Try vfl leaks."
        )
    if embeddings:
        uploads = any(exchange.exchange == "upload" for exchange in received)
        figure = f"{_UPLOAD:.2f} from one upload" if uploads else f"{_TRAINING:.2f} from training"
        yield (
            f"Embeddings of {embeddings} leave without a defence: the active party can reconstruct "
            f"the passive parties' columns from them (R² {figure} in our rehearsals, "
            f"the highest of {WHERE['binary']}, not on yours). Try vfl leaks; add a defence."
        )


def describe_encryption(summary: Summary) -> str:
    """Returns a sentence on encryption for each phase that can encrypt gradients."""
    sentences = [
        f"Gradients of {exchange.phase} left {exchange.how}."
        for exchange in summary.exchanges
        if "encrypted" in exchange.how
    ]
    return " ".join(dict.fromkeys(sentences))


def describe_exchanges(summary: Summary) -> list[str]:
    """Returns sentences about the labels and encrypted gradients in the messages of a run."""
    return [
        *filter(None, (describe_label_exposure(summary.exchanges), describe_encryption(summary)))
    ]


def _list_undefended(exchanges: Iterable[ExchangeSummary], filters: int) -> str:
    """Returns the names of the phases whose exchanges have no defence: at most ``filters`` filters,
    and no values drawn at random by the method.
    """
    return _join_phases(
        exchange
        for exchange in exchanges
        if _count_filters(exchange) <= filters and not exchange.how.startswith("drawn")
    )


def _count_filters(exchange: ExchangeSummary) -> int:
    return len(exchange.chain.split(ARROW))


def _join_phases(exchanges: Iterable[ExchangeSummary]) -> str:
    return ", ".join(dict.fromkeys(exchange.phase for exchange in exchanges))
