"""Sums of what has left as lines of text."""

from __future__ import annotations

from collections.abc import Mapping

from vfl_common.text import align_columns, to_json
from vfl_party.record.history import DisclosureSum
from vfl_party.record.lines import Route

_NUMBERS = ("bundles", "people", "numbers", "of the person", "bytes")
_HEAD = (
    "run",
    "to",
    "phase",
    "exchange",
    "kind",
    "bundles",
    "people",
    "numbers",
    "of the person",
    "bytes",
    "as",
)


def json_lines(sums: Mapping[tuple[str, str, Route], DisclosureSum]) -> list[str]:
    """Returns a JSON object for each receiver and exchange of a run."""
    return [
        to_json({"to": to, **way.fields, **total.fields}, compact=True)
        for (_, to, way), total in sums.items()
    ]


def table(
    sums: Mapping[tuple[str, str, Route], DisclosureSum], *, of_person: bool = False
) -> list[str]:
    """Returns a line for each receiver and exchange of a run, below a line of names; one sentence
    without any. Bytes are those of messages: a question of a served model has ids in it, and no
    tensor. ``of_person``: one was asked for, whose numbers have a column.
    """
    if not sums:
        return [
            "nothing has left about this person, except masked ids if the table was aligned by psi"
            if of_person
            else "nothing has left"
        ]
    rows = [
        (
            run,
            to,
            way.phase,
            way.exchange,
            way.kind,
            f"{total.bundles:,}",
            f"{total.people:,}",
            f"{total.numbers:,}",
            "" if total.of_person is None else f"{total.of_person:,}",
            f"{total.message_bytes:,}",
            "; ".join(part for part in (way.chain, way.how) if part),
        )
        for (run, to, way), total in sums.items()
    ]
    columns = [place for place, name in enumerate(_HEAD) if of_person or name != "of the person"]
    return align_columns(([row[place] for place in columns] for row in (_HEAD, *rows)), _NUMBERS)
