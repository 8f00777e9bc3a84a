"""Prints the result of a run as tables."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from vfl.report.notes import about_exchanges, protection_notes
from vfl.report.reading import Own
from vfl.report.rounds import RoundLine
from vfl_common.ledger import CONTROL
from vfl_common.summary import LinkBytes, SetQuality, Summary, Worth
from vfl_common.text import clean, percent

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_SPLITS = ("train", "validation", "test")
# Phases before those of the recipe.
FIRST = ("align", "open")
# Maximum number of sets of parties in a table: all sets of four parties.
_MAX_SETS = 16
# Width in characters without a terminal.
PIPE_WIDTH = 120
WORDS = (
    "align: entity alignment. open: the parties compare their rows.\n"
    "envelope: all of a message except its tensors (payload). kB = 1,000 bytes."
)


def size(count: int) -> str:
    """Formats bytes in a suitable decimal unit, such as ``1.25 MB``."""
    for factor, unit in _UNITS:
        if count >= factor:
            return (
                f"{count / factor:.3g} {unit}"
                if count < 1000 * factor
                else f"{count / factor:,.0f} {unit}"
            )
    return f"{count} B"


def is_one(used: Mapping[str, int]) -> bool:
    """Whether all parties use the same number of rows; ``used``: {party: number}."""
    return len(set(used.values())) == 1


def show(summary: Summary, phases: Sequence[str] = (), console: Console | None = None) -> None:
    """Prints the tables to ``console``; by default to standard output.

    ``phases``: the phases in the order of the recipe.
    """
    (console or wide_console()).print(render(summary, phases))


def show_own(own: Own) -> None:
    """Prints the notes of one process on a run without a summary: its ledger, and its newest round
    if the run goes on.
    """
    table = new_table(f"Messages counted by {own.name}{' so far' if own.goes_on else ''}")
    for heading in ("phase", "peer", "what", "direction"):
        table.add_column(heading)
    for heading in ("payload", "message bytes", "messages"):
        table.add_column(heading, justify="right")
    for entry in own.entries:
        counts = (size(entry.payload_bytes), size(entry.message_bytes), f"{entry.messages:,}")
        table.add_row(
            clean(entry.phase), clean(entry.peer), clean(entry.kind), entry.direction, *counts
        )
    words = f"\n{WORDS}\ncontrol: the session with the server, and opening streams.\n"
    newest = [Text(f"{_round(own.last)}\n")] if own.goes_on and own.last is not None else []
    wide_console().print(Group(Text(), table, Text(words, "dim"), *newest))


def _round(last: RoundLine) -> str:
    """Returns a line about the last round that a party has finished, with its metrics."""
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
    """Returns a console on standard output; ``width``: its minimum width if it is not a
    terminal.
    """
    # Without markup, because peers choose some of the texts.
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, width)
    return console


def as_html(tables: Group) -> str:
    """Returns tables as HTML, for a notebook."""
    out = io.StringIO()
    # In a notebook the console displays what it prints unless force_jupyter is False.
    console = Console(record=True, width=PIPE_WIDTH, file=out, force_jupyter=False, markup=False)
    console.print(tables)
    return console.export_html(
        inline_styles=True, code_format="<pre style='line-height:1.2'>{code}</pre>"
    )


def render(summary: Summary, phases: Sequence[str] = ()) -> Group:
    """Returns all tables of a run, one above the other."""
    order = in_order(summary, phases)
    parts: list[Text | Table] = [
        Text.assemble("\n", (summary.run_id, "bold"), f"\n{_headline(summary)}")
    ]
    if summary.privacy is not None:
        parts += [Text(f"\nDifferential privacy: {summary.privacy.statement}")]
    for table in (
        _metrics(summary),
        *_worth(summary),
        _processes(summary),
        _by_party(summary, order),
        _by_phase(summary, order),
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
    for note in protection_notes(summary):
        parts += [Text(f"\n{clean(note)}", "yellow")]
    for note in about_exchanges(summary):
        parts += [Text(f"\n{clean(note)}", "yellow" if "NOT" in note else "")]
    without = ", without killed or stopped processes" if _is_disturbed(summary) else ""
    words = (
        f"{WORDS}\ncontrol: sessions with the server, and opening streams. TCP: counted by the "
        f"kernel{without}."
    )
    parts += [Text(f"\n{words}", "dim")]
    return Group(*parts, Text())


def _is_disturbed(summary: Summary) -> bool:
    """Whether a process may have crashed during the run."""
    return bool(
        summary.interruptions or summary.absences or any(party.returns for party in summary.parties)
    )


def in_order(summary: Summary, phases: Sequence[str] = ()) -> list[str]:
    """Orders the phases with bytes: alignment, comparison of rows, the phases of the recipe, then
    the sessions (control).
    """
    known = [*FIRST, *phases]
    names = list(summary.bytes.by_phase)
    return sorted(
        names,
        key=lambda name: (name == CONTROL, known.index(name) if name in known else len(known)),
    )


def _headline(summary: Summary) -> str:
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
    held = {party.name: party.rows for party in summary.parties if party.rows}
    if held:
        used = {party.name: party.common_rows for party in summary.parties if party.rows}
        shares = ", ".join(
            f"{name} {percent(used[name], rows)} of {rows:,}" for name, rows in held.items()
        )
        # With rows.partial the parties use different rows.
        what = f"{max(used.values()):,} common rows" if is_one(used) else "rows used"
        parts.append(f"{what} ({shares})")
    if summary.without:
        parts.append(f"trained without {', '.join(summary.without)} (joined too late)")
    missed = Counter[str]()
    for absence in summary.absences:
        missed[absence.party] += absence.steps
    parts += [f"{steps:,} steps without {party}" for party, steps in missed.items()]
    if summary.interruptions:
        parts.append(_plural(summary.interruptions, "interruption"))
    if summary.server_restarts:
        parts.append(_plural(summary.server_restarts, "restart") + " of the server")
    for party in summary.parties:
        if party.skipped_rounds:
            parts.append(f"{_plural(party.skipped_rounds, 'round')} skipped by {party.name}")
        if party.returns:
            parts.append(f"{_plural(party.returns, 'return')} of {party.name}")
        if changes := party.arithmetic.changes if party.arithmetic is not None else []:
            parts.append(
                f"{_plural(len(changes), 'resume')} of {party.name} with different arithmetic "
                f"(equal up to rounding from {changes[0].checkpoint} on)"
            )
    return " · ".join(parts)


def _plural(count: int, what: str) -> str:
    """Returns ``1 interruption``, ``2 interruptions``, and so on."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def new_table(title: str, show_footer: bool = False) -> Table:
    """Returns an empty table in our style."""
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


def splits(summary: Summary) -> list[str]:
    """Returns the splits that have metrics, in their usual order."""
    return sorted(
        summary.metrics,
        key=lambda name: (_SPLITS.index(name) if name in _SPLITS else len(_SPLITS), name),
    )


def _metrics(summary: Summary) -> Table:
    table = new_table("Metrics")
    table.add_column("rows")
    names = list(dict.fromkeys(name for named in summary.metrics.values() for name in named))
    for name in names:
        table.add_column(name, justify="right")
    for split in splits(summary):
        named = summary.metrics[split]
        table.add_row(split, *(f"{named[name]:.4g}" if name in named else "" for name in names))
    return table


def sets_shown(worth: Worth) -> list[SetQuality]:
    """Returns the sets of parties to show, the best by test rows first: all if they are few;
    otherwise none, each party alone, all but one, and all.
    """
    whole = max((len(subset.parties) for subset in worth.subsets), default=0)
    subsets = worth.subsets
    if len(subsets) > _MAX_SETS:
        subsets = [subset for subset in subsets if len(subset.parties) in (0, 1, whole - 1, whole)]

    def place(subset: SetQuality) -> tuple[bool, float]:
        value = subset.test if subset.test is not None else subset.validation
        sign = 1 if worth.lower_is_better else -1
        return value is None, 0.0 if value is None else sign * value

    return sorted(subsets, key=place)


def _worth(summary: Summary) -> list[Table]:
    """Returns tables of the contribution of each party and of the quality of sets of parties."""
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
    for of in sets_shown(worth):
        named = ", ".join(clean(name) for name in of.parties) or "none"
        sets.add_row(named, _number(of.validation), _number(of.test))
    return [values, sets]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _processes(summary: Summary) -> Table:
    table = new_table("Processes")
    gpus = any(party.peak_memory_bytes is not None for party in summary.parties)
    for heading in ("name", "role", "device", "hardware"):
        table.add_column(heading)
    for heading in ("pid", "steps", "seconds", *(["GPU memory"] if gpus else [])):
        table.add_column(heading, justify="right")
    for party in summary.parties:
        done = ("", "") if party.role == "server" else (f"{party.steps:,}", f"{party.wall_s:.1f}")
        peak = "" if party.peak_memory_bytes is None else size(party.peak_memory_bytes)
        row = (party.name, party.role, party.device, party.device_name, str(party.pid), *done)
        table.add_row(*row, *([peak] if gpus else []))
    return table


def _by_party(summary: Summary, phases: Sequence[str]) -> Table:
    """Returns message bytes by phase, and for all phases message bytes, payload, and the kernel's
    counts.
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
    links, kernel = summary.bytes.by_link, _on_tcp(summary)
    for party in summary.parties:
        own_machine = [machine for machine in machines if machine.party == party.name]
        ends = (
            ("sent", [link for link in links if link.sender == party.name]),
            ("received", [link for link in links if link.receiver == party.name]),
        )
        for direction, own in ends:
            on_tcp = sum(
                count
                for pair, count in kernel.items()
                if pair[direction == "received"] == party.name
            )
            on_it = sum(
                machine.sent_bytes if direction == "sent" else machine.received_bytes
                for machine in own_machine
            )
            table.add_row(
                party.name if direction == "sent" else "",
                direction,
                *(_or_dash(sum(_messages(own, phase))) for phase in phases),
                size(sum(link.message_bytes for link in own)),
                size(sum(link.payload_bytes for link in own)),
                _or_dash(on_tcp),
                *([_or_dash(on_it)] if machines else []),
            )
    return table


def _messages(links: Iterable[LinkBytes], phase: str) -> list[int]:
    return [link.message_bytes for link in links if link.phase == phase]


def _or_dash(count: int) -> str:
    return size(count) if count else "–"


def _by_phase(summary: Summary, phases: Sequence[str]) -> Table:
    table = new_table("Bytes by phase, every message counted once", show_footer=True)
    total = summary.bytes.total
    envelope = total.message_bytes - total.payload_bytes
    table.add_column("phase", "all")
    table.add_column("payload", size(total.payload_bytes), justify="right")
    table.add_column("envelope", size(envelope), justify="right")
    table.add_column("message bytes", size(total.message_bytes), justify="right")
    table.add_column("messages", f"{total.messages:,}", justify="right")
    table.add_column("on TCP", _or_dash(sum(_on_tcp(summary).values())), justify="right")
    for phase in phases:
        count = summary.bytes.by_phase[phase]
        table.add_row(
            phase,
            size(count.payload_bytes),
            size(count.message_bytes - count.payload_bytes),
            size(count.message_bytes),
            f"{count.messages:,}",
            "",
        )
    return table


def _on_tcp(summary: Summary) -> dict[tuple[str, str], int]:
    """Returns {(sender, receiver): bytes}.

    If the two ends disagree, the larger count is used: that end observed the connection longer.
    """
    totals: dict[tuple[str, str], int] = {}
    for count in summary.bytes.tcp:
        for key, bytes_seen in (
            ((count.party, count.peer), count.sent_bytes),
            ((count.peer, count.party), count.received_bytes),
        ):
            totals[key] = max(bytes_seen, totals.get(key, 0))
    return totals
