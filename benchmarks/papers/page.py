"""Makes a page for each paper, ``benchmarks/results/papers/PAPER.md``, and the table of
``docs/results/papers.md``, from the study files and the results.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.papers import shelf
from benchmarks.papers.definition import frozen
from benchmarks.papers.describe import SCALES, Table, run_at
from benchmarks.papers.result import RESULTS, Result, judged, load, markdown, with_verdicts
from benchmarks.papers.rules import Verdict, overall

FOLDER = RESULTS
_EXPLAINED = "../../../docs/results/papers.md"
_COLUMNS = 100
_DATA = "Data"
_MADE = """This page is made by `python -m benchmarks.papers --page` from the study files in
`benchmarks/papers` and from the results in `benchmarks/results/papers`. Do not edit it.
"""


def pages() -> dict[Path, str]:
    """Returns the text of each page."""
    made = {
        _path(key, part): "\n".join(_paper(key, part))
        for key, paper in shelf.PAPERS.items()
        for part in ("", *paper.apart)
    }
    return {path: text.rstrip() + "\n" for path, text in made.items()}


def write() -> None:
    """Writes the pages, and the verdicts of current results into their files."""
    for name in shelf.names():
        if (result := kept(name)) is not None:
            with_verdicts(shelf.load(name), result).save(RESULTS)
    for path, text in pages().items():
        path.write_text(text)


def kept(name: str) -> Result | None:
    """Returns the current results of the larger scale that was run."""
    table = shelf.load(name)
    current = (found for e in SCALES if (found := load(name, e)) and found.is_current(table))
    return next(current, None)


def stale(name: str) -> Result | None:
    """Returns results of another definition of a table that has none of its present one."""
    found = (found for each in SCALES if (found := load(name, each)))
    return None if kept(name) is not None else next(found, None)


def _path(key: str, part: str = "") -> Path:
    return FOLDER / ("-".join(filter(None, (key, part))) + ".md")


def _names(key: str) -> list[str]:
    return [each for each in shelf.names() if each.startswith(f"{key}.")]


def _names_on(key: str, part: str) -> list[str]:
    """Returns the names of the tables on a page."""
    apart = shelf.PAPERS[key].apart
    if part:
        return [*apart[part]]
    return [each for each in _names(key) if not any(each in names for names in apart.values())]


def coverage() -> str:
    """Returns the table of docs/results/papers.md: the verdicts by paper."""
    headings = (
        "tables and figures",
        "with current results",
        "claims",
        "hold",
        "contradicted",
        "undecided",
        "not run",
    )
    rows = [_row("paper", *headings), _row(*["---"] * 8)]
    for key, paper in shelf.PAPERS.items():
        results = {name: kept(name) for name in _names(key) if not shelf.load(name).ours}
        verdicts: list[Verdict] = [
            overall(findings)
            for name, result in results.items()
            for claim, findings in judged(shelf.load(name), result)
            if not claim.ours
        ]
        verdict_names: tuple[Verdict, ...] = ("holds", "contradicted", "undecided", "not run")
        counts = [verdicts.count(each) for each in verdict_names]
        ran = sum(each is not None for each in results.values())
        folder = "../../benchmarks/results/papers"
        links = ", ".join(
            f"[{part or paper.name}]({folder}/{_path(key, part).name})"
            for part in ("", *paper.apart)
        )
        rows.append(_row(f"{links} ({paper.of})", len(results), ran, len(verdicts), *counts))
    return "".join(f"{row}\n" for row in rows)


def _paper(key: str, part: str) -> Iterator[str]:
    """Yields a paper's page: its tables with results, what they share, and the others. ``part``: a
    key of the paper's ``apart``, or empty.
    """
    paper = shelf.PAPERS[key]
    tables = {name: shelf.load(name) for name in _names_on(key, part)}
    results = {name: found for name in tables if (found := kept(name)) is not None}
    yield f"# {paper.name}: tables and figures{f' of {part}' if part else ''}\n"
    yield f"The tables and figures of {paper.name} ({paper.of}) that were run here.\n"
    yield _MADE
    yield f"[The papers' tables]({_EXPLAINED}) explains the cells and the verdicts.\n"
    others_at = {each: _path(key, each).name for each in ("", *paper.apart) if each != part}
    for what, name in others_at.items():
        yield f"[{paper.name}'s tables{f' of {what}' if what else ''}]({name}) have another page.\n"
    told = {name: _notes(tables[name], found) for name, found in results.items()}
    times = Counter(note for each in told.values() for note in each)
    common = [note for note, count in times.items() if count > 1]
    for ours in (False, True):
        shown = [name for name in results if tables[name].ours == ours]
        if ours and shown:
            yield "## The project's own studies\n"
            yield "Not in the paper. They are not among its claims.\n"
        for name in shown:
            notes = [note for note in told[name] if note not in common]
            section_ = _section(name, tables[name], results[name], 2 + ours, notes, briefly=True)
            yield section_ + "\n"
    if common:
        yield "## What several of these tables share\n"
        for note in common:
            # The tables show which data they have.
            if not note.startswith(_DATA):
                places = [tables[name].place for name, each in told.items() if note in each]
                where = "all" if len(places) == len(told) else ", ".join(places)
                note = f"{where}: {note}"
            yield _item(note)
        yield ""
    if old := {name: found for name in tables if (found := stale(name)) is not None}:
        yield "## Results of another definition\n"
        yield "These tables have changed since their last run. The files of the runs are kept, but"
        yield "are not shown, because they are not results of the tables as they are.\n"
        yield from (f"- `{name}`, scale `{e.scale}`, {e.day}" for name, e in old.items())
        yield ""
    if others := [name for name in tables if name not in results]:
        yield "## Without current results\n"
        yield "| table | what | needs | claims, not run |"
        yield "| --- " * 4 + "|"
        for name in others:
            yield _without_results(name, tables[name])
        yield "\nTheir deviations from the paper:\n"
        notes = Counter(note for name in others for note in tables[name].notes)
        for note in notes:
            places = [tables[name].place for name in others if note in tables[name].notes]
            where = "all" if len(places) == len(others) > 1 else ", ".join(places)
            yield _item(f"{where}: {note}")


def _without_results(name: str, table: Table) -> str:
    """Returns one row for a table that was not run."""
    needs = f"the data of {', '.join(each.name for each in run_at(table, 'paper').data)}"
    if table.needs:
        needs += f"; {table.needs}"
    claims = "; ".join(each.says for each in table.claims)
    return _row(f"`{name}`", f"{table.place}: {table.title}", needs, claims)


def _section(
    name: str,
    table: Table,
    result: Result,
    level: int,
    notes: Iterable[str],
    *,
    briefly: bool = False,
) -> str:
    paper = shelf.PAPERS[name.partition(".")[0]].name
    how = f"`{name}`; the paper's numbers: {table.source}. {_run(table, result)}"
    body = markdown(table, result, briefly=briefly).splitlines()
    if briefly and table.runs_of:
        body = [line for line in body if line and not line.startswith("|")]
        how += f" The cells are those of `{table.runs_of}`."
    return "\n".join(
        [
            f"{'#' * level} {paper}, {table.place}: {table.title}\n",
            textwrap.fill(how, _COLUMNS, break_long_words=False, break_on_hyphens=False) + "\n",
            *(_item(line.removeprefix("- ")) if line.startswith("- ") else line for line in body),
            *(_item(note) for note in notes),
        ]
    )


def _notes(table: Table, result: Result) -> list[str]:
    """Returns the deviations, what is to know of the data, and what was not run."""
    told: dict[str, list[str]] = {}
    for data, notes in result.notes.items():
        told.setdefault(" ".join(notes), []).append(data)
    return [
        *(f"Deviation: {note}" for note in table.notes),
        *(f"{_DATA} ({', '.join(data)}): {note}" for note, data in told.items() if note),
        *(f"Not run: {what}." for what in _reasons(result)),
    ]


def _item(text: str) -> str:
    """Returns an item of a list, in short lines of which none looks like another item."""
    lines = textwrap.fill(
        text,
        _COLUMNS,
        initial_indent="- ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return re.sub(r"^  (?=[-+*#>] )", r"  \\", lines, flags=re.MULTILINE)


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _run(table: Table, result: Result) -> str:
    how = f"Scale `{result.scale}`"
    if result.scale == "small":
        how += f" ({table.small})"
    seeds = f"{len(result.seeds)} seeds" if len(result.seeds) > 1 else "1 seed"
    day = frozen().get(result.name, {}).get("day")
    return (
        f"{how}, {seeds}, {result.day}, {result.seconds / 60:.1f} minutes of runs on "
        f"{result.cores} cores{f' ({result.machine})' if result.machine else ''}"
        f"{f', commit {result.commit}' if result.commit else ''}."
        f"{f' Claims and rules as of {day}.' if day else ''}"
    )


def _reasons(result: Result) -> Iterator[str]:
    """Yields what was not run: data sets that are absent together, lines with their reasons."""
    if result.absent:
        yield f"the data of {', '.join(result.absent)} are not at hand"
    for line, why in result.left_out.items():
        yield f"{line}: {why.partition(' (')[0]}"
