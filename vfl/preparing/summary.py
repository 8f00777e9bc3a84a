"""Writes the summary of ``vfl prepare``, and the comment at the top of the recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from vfl.preparing.asked import PreparePlan
from vfl.preparing.content import TEST, TRAIN, VALIDATION, Content, Rows
from vfl.preparing.dataset import Files
from vfl.preparing.writing import PartyTable
from vfl.report.table import format_size

_SPLITS = (TRAIN, VALIDATION, TEST)


def make_header(asked: PreparePlan) -> str:
    """Returns the comment at the top of a recipe."""
    return (
        f"# {asked.dataset.title}: {asked.division.says}.\n"
        f"# The values are {_describe_origin(asked)}.\n"
        "# Written by `vfl prepare`; see PREPARED.md. Run it with `vfl simulate`.\n\n"
    )


def _describe_origin(asked: PreparePlan) -> str:
    use = asked.numbers
    if use is None:
        return "our own, because no paper divides the data set like this"
    return f"from {use.paper} ({use.where})"


def describe_data(
    asked: PreparePlan,
    content: Content,
    used: Rows,
    files: Files,
    notes: Sequence[str],
    written: Sequence[PartyTable],
) -> str:
    """Returns the summary in Markdown."""
    return "\n\n".join(_paragraphs(asked, content, used, files, notes, written)) + "\n"


def _paragraphs(
    asked: PreparePlan,
    content: Content,
    used: Rows,
    files: Files,
    notes: Sequence[str],
    written: Sequence[PartyTable],
) -> Iterator[str]:
    dataset, use, request = asked.dataset, asked.numbers, asked.request
    who = "parties" if asked.division.aligned else "clients"
    yield f"# {dataset.title}, prepared for {request.parties} {who}"
    yield (
        f"The parties have {asked.division.says}. The values of the recipe are "
        f"{_describe_origin(asked)}. All draws use the seed {request.seed}."
    )
    lines = [
        f"| {table.name} | `{table.path.name}` | {table.rows:,} | {table.features} | "
        f"{format_size(table.bytes)} |"
        for table in written
    ]
    yield "\n".join(
        ["| party | table | rows | features | size |", "| --- | --- | --- | --- | --- |", *lines]
    )
    yield _describe_rows(asked, content, used)
    if not asked.division.aligned:
        yield f"Rows were dealt to clients: `{request.deal}`; test rows evenly."
    for key, value in request.options.items():
        yield f"`{key} = {value}`: {dataset.options[key][1]}"
    yield "## Sources"
    read = "\n".join(
        f"- `{path.name}`, {format_size(path.stat().st_size)}" for path in files.values()
    )
    yield f"{dataset.title} is published by {dataset.publisher}. These files were read:\n\n{read}"
    yield "## Differences"
    if notes:
        yield "\n".join(f"- {note}" for note in notes)
    else:
        yield "These are all rows of the official files, unchanged."
    if use is not None and use.silent:
        yield f"## What {use.paper} does not specify"
        yield use.silent


def _describe_rows(asked: PreparePlan, content: Content, used: Rows) -> str:
    """Returns a sentence about the splits, and the names of the classes by number."""
    text = "These files define no splits, so the recipe divides the rows."
    if content.splits is not None:
        counts = Counter(content.splits[used].tolist())
        sizes = ", ".join(f"{counts[split]:,} {split}" for split in _SPLITS if counts[split])
        text = f"{content.split_says}: {sizes}."
        if asked.validation:
            text += f" {100 * asked.validation:g} % of these training rows are for validation."
    if content.classes:
        named = ", ".join(f"{number} {name}" for number, name in enumerate(content.classes))
        text += f" Classes: {named}."
    return text
