"""Renders the totals of disclosures as text or JSON lines."""

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
    """Returns a line of JSON for each receiver and exchange of a run."""
    return [
        to_json({"to": to, **way.fields, **total.fields}, compact=True)
        for (_, to, way), total in sums.items()
    ]


def table(
    sums: Mapping[tuple[str, str, Route], DisclosureSum], *, of_person: bool = False
) -> list[str]:
    """Returns a table with a header and a line for each receiver and exchange of a run.

    Without any disclosures, it returns one sentence. The bytes are those of messages, because a
    request to a served model has ids but no tensors. ``of_person``: Whether the table has a column
    with the numbers about the person of a query.
    """
    if not sums:
        return [
            "nothing was sent about this person, except masked ids if the table was aligned by psi"
            if of_person
            else "nothing was sent"
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
