"""Reads a record: all bundles that were sent, with their receivers, runs and people.

A policy can also read the record before a bundle is sent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError
from vfl_common.text import list_names
from vfl_party.record.book import LINES, lines_from, secret_of
from vfl_party.record.lines import (
    ALL,
    TAG,
    TOGETHER,
    Route,
    Rows,
    find_rows,
    tag_person,
    unpack_rows,
    unpack_tags,
)

# The maximum number of names in a message. For runs these are the newest.
_MAX_NAMES = 10
# The maximum number of rows, whose numbers have four bytes, and the maximum of all other numbers,
# so that sums do not overflow.
_MAX_ROWS, _MAX_NUMBER = 2**32, 2**48


@dataclass(frozen=True)
class Disclosure:
    """One bundle that the party sent.

    Args:
        line: The number of the line in the record, from 0.
        at: The time in seconds since 1970.
        way: The direction of an exchange in which the bundle was sent.
        to: The receivers. Each got the whole bundle.
        round: The round of the step.
        batch: The batch of the step.
        numbers: The count of numbers to each receiver, before the codec.
        payload_bytes: The bytes of tensors to each receiver, as in the ledger.
        message_bytes: The bytes of messages to each receiver, as in the ledger.
        messages: The number of messages to each receiver.
        about: The packed row numbers or the packed tags of the people in the bundle.
        digest: The digest of the bundle.
        people: The digest of the table of people to which the row numbers refer.
        table_rows: The number of rows in this table.
        asked: The number of ids in a request to a served model, whether answered or not.
        keys: {receiver: pin of its key} for the receivers that sent a head of their record.
        of_person: The count of numbers about the person of a query, or None without a query.
    """

    line: int
    at: float
    way: Route
    to: tuple[str, ...]
    round: int
    batch: int
    numbers: int
    payload_bytes: int
    message_bytes: int
    messages: int
    about: str | None
    digest: str
    people: str = ""
    table_rows: int = 0
    asked: int = 0
    keys: Mapping[str, str] = field(default_factory=dict)
    of_person: int | None = None

    @property
    def rows(self) -> Rows:
        """The ascending numbers of the rows in the bundle, or none if the line has ``tags``.

        Raises InputError if the line was changed.
        """
        if self.about is None or self.about == TOGETHER or self.tags is not None:
            return np.empty(0, np.int64)
        if self.about == ALL:
            return np.arange(self.table_rows)
        try:
            numbers = unpack_rows(self.about)
            if not len(numbers) or numbers[-1] < self.table_rows:
                return numbers
        except ValueError:
            pass
        raise self._invalid_rows

    @property
    def tags(self) -> tuple[npt.NDArray[np.void], Rows] | None:
        """The tags of the people in the bundle, and how often each occurs.

        None if the line has row numbers. Raises InputError if the line was changed.
        """
        try:
            return unpack_tags(self.about)
        except ValueError:
            raise self._invalid_rows from None

    @property
    def people_told(self) -> int:
        """The number of different people in it. Raises InputError if the line was changed."""
        tagged = self.tags
        return len(np.unique(tagged[0] if tagged is not None else self.rows))

    @property
    def _invalid_rows(self) -> InputError:
        return InputError(
            Code.FILE_INVALID,
            f"line {self.line + 1} of the record: refers to rows that do not exist. Restore the "
            "record from a copy.",
        )

    def of(self, times: int, among: int) -> Disclosure:
        """Returns a copy with the count of numbers about one person.

        ``times``: How often the bundle has the person. ``among``: The number of entries in the
        bundle. The count is the one that the account of disclosures uses.
        """
        return replace(self, of_person=times * -(-self.numbers // among))

    @property
    def fields(self) -> dict[str, Any]:
        """The values for JSON, with the number of people instead of the rows."""
        return {
            "line": self.line,
            "at": self.at,
            **self.way.fields,
            "to": list(self.to),
            "keys": {name: key for name, key in self.keys.items() if name in self.to},
            "round": self.round,
            "batch": self.batch,
            "people": self.people_told,
            **({"asked": self.asked} if self.asked else {}),
            "numbers": self.numbers,
            "payload_bytes": self.payload_bytes,
            "message_bytes": self.message_bytes,
            "messages": self.messages,
            "digest": self.digest,
            **({} if self.of_person is None else {"of_person": self.of_person}),
        }


@dataclass(frozen=True)
class PrivateStep:
    """One step of training with differential privacy.

    Args:
        run: The id of the run.
        generation: The generation of the run.
        phase: The name of the phase.
        cost: The privacy cost of one step for each person, a ``Mechanism`` as text.
        steps: The number of steps with the same sampling and noise keys, including this one.
        of: Identifies these keys.
        to: The parties that learn results computed with the model.
        people: See ``Disclosure``.
        table_rows: See ``Disclosure``.
    """

    run: str
    generation: int
    phase: str
    cost: str
    steps: int
    of: str
    to: tuple[str, ...]
    people: str = ""
    table_rows: int = 0


class RecordReader:
    """Parses the lines of a record in their order.

    ``known``: {(kind, name): line} for the lines to which later lines refer. With the ``known`` of
    another reader, a new reader can continue after that reader's last line.
    """

    def __init__(self, known: Mapping[tuple[str, str], dict[str, Any]] | None = None) -> None:
        self.known: dict[tuple[str, str], dict[str, Any]] = {}
        self._ways: dict[str, Route] = {}
        # {(run, generation): (digest of the rows' ids, number of rows)}.
        self._people_of_run: dict[tuple[str, int], tuple[str, int]] = {}
        self._keys: dict[str, str] = {}
        for line in (known or {}).values():
            self._store_declaration(line)

    def read(self, number: int, text: bytes) -> Disclosure | PrivateStep | None:
        """Parses a line. Returns None for a line that only declares what later lines refer to.

        Raises ValueError, KeyError, TypeError, AttributeError or RecursionError if the line is
        invalid.
        """
        line = json.loads(text)
        if not isinstance(line, dict):
            raise TypeError("a line of a record is not a JSON object")
        if "sent" in line:
            way = self._ways[line["sent"]]
            return _parse_disclosure(number, line, way, self._people_of_run, self._keys)
        if "private" in line:
            run = _require_text(line["run"]), _require_number(line["generation"])
            people = self._people_of_run.get(run, ("", 0))
            to = tuple(map(_require_text, line["to"]))
            phase, cost, of = (_require_text(line[name]) for name in ("private", "cost", "of"))
            return PrivateStep(*run, phase, cost, _require_number(line["steps"]), of, to, *people)
        self._store_declaration(line)
        return None

    def _store_declaration(self, line: dict[str, Any]) -> None:
        if "way" in line:
            field_names = line.keys() & Route.__dataclass_fields__
            values: dict[str, Any] = {
                name: _require_text(line[name]) for name in field_names - {"generation"}
            }
            self._ways[line["way"]] = Route(
                generation=_require_number(line["generation"]), **values
            )
            self.known["way", line["way"]] = line
        elif "people" in line:
            run = _require_text(line["run"]), _require_number(line["generation"])
            bytes.fromhex(line["people"])
            self._people_of_run[run] = line["people"], _require_number(line["rows"], _MAX_ROWS)
            self.known["people", f"{run[0]}/{run[1]}"] = line
        elif "head" in line:
            self._keys = {**self._keys, _require_text(line["head"]): _require_text(line["key"])}
            self.known["head", line["head"]] = line
        elif "run" in line:
            self._keys = {**self._keys, **line["keys"]}
            self.known["run", ""] = line


class RecordHistory:
    """Reads the current lines of a party's record.

    Args:
        folder: The folder of the record.

    Raises InputError if there is no record.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / LINES
        if not self._path.is_file():
            raise InputError(
                Code.FILE_INVALID,
                f"{folder}: contains no record. Check record.folder of the party file; a party "
                "that has sent nothing has no record.",
            )

    def disclosures(
        self,
        *,
        run: str | None = None,
        peer: str | None = None,
        phase: str | None = None,
        kind: str | None = None,
    ) -> Iterator[Disclosure]:
        """Yields the disclosures that match all given filters, the oldest first.

        Raises InputError, which names the line, if a line is invalid.
        """
        for disclosure in self._all():
            way = disclosure.way
            if (
                run in (None, way.run)
                and phase in (None, way.phase)
                and kind in (None, way.kind)
                and (peer is None or peer in disclosure.to)
            ):
                yield disclosure

    def check_known(self, **filters: str | None) -> None:
        """Raises InputError if a ``run``, ``peer``, ``phase`` or ``kind`` is not in the record.

        Otherwise a query with a typing error would look as if nothing had been sent.
        """
        values_by_filter: dict[str, set[str]] = {
            name: set() for name, value in filters.items() if value
        }
        if not values_by_filter:
            return
        for disclosure in self._all():
            for name, values in values_by_filter.items():
                values.update(disclosure.to if name == "peer" else [getattr(disclosure.way, name)])
        for name, values in values_by_filter.items():
            if filters[name] not in values:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"{self._folder}: the record has no {name} {filters[name]}. Choose one of: "
                    f"{list_names(sorted(values)[-_MAX_NAMES:]) or 'none'}.",
                )

    def about(self, spellings: Collection[str], of: Iterable[Disclosure]) -> Iterator[Disclosure]:
        """Yields the disclosures about one person, with the count of numbers about the person.

        Args:
            spellings: The person's id in each normalised form that the runs used.
            of: The disclosures to search.

        Raises InputError if a line or a file of people is invalid.
        """
        secret = secret_of(self._folder)
        tags = [tag_person(secret, spelling) for spelling in spellings]
        if not tags:
            return
        rows_by_people: dict[str, Rows] = {}
        person_tags = np.frombuffer(b"".join(tags), TAG)
        for disclosure in of:
            if (packed := disclosure.tags) is not None:
                row_tags, counts = packed
                times = int(counts[np.isin(row_tags, person_tags)].sum())
                if times:
                    yield disclosure.of(times, int(counts.sum()))
                continue
            if not disclosure.people or not disclosure.about:
                continue
            if disclosure.people not in rows_by_people:
                rows_by_people[disclosure.people] = np.concatenate(
                    [find_rows(self._folder, disclosure.people, tag) for tag in tags]
                )
            rows = disclosure.rows
            times = int(np.isin(rows, rows_by_people[disclosure.people]).sum())
            if times:
                yield disclosure.of(times, len(rows))

    def runs_with(self, spellings: Collection[str]) -> dict[str, bool]:
        """Returns {run: whether a person was in its rows} for the runs whose rows the record lists.

        These are the rows for training, validation or test. ``spellings``: The person's id in each
        normalised form that the runs used. Raises InputError if a line or a file is invalid.
        """
        reader, secret = RecordReader(), secret_of(self._folder)
        for _ in self.lines(reader):
            pass
        tags = [tag_person(secret, spelling) for spelling in spellings]
        runs: dict[str, bool] = {}
        for (kind, _), line in reader.known.items():
            if kind != "people" or line["what"] != "aligned":
                continue
            run, digest = line["run"], line["people"]
            has_person = any(len(find_rows(self._folder, digest, tag)) for tag in tags)
            runs[run] = runs.get(run, False) or has_person
        return runs

    def _all(self) -> Iterator[Disclosure]:
        return (entry for entry, _ in self.lines() if isinstance(entry, Disclosure))

    def lines(
        self, reader: RecordReader | None = None, number: int = 0, at: int = 0
    ) -> Iterator[tuple[Disclosure | PrivateStep | None, int]]:
        """Yields the parsed content of each complete line, and the offset of the line's end.

        Args:
            reader: A reader that has already read the first ``number`` lines.
            number: The number of the first line to read.
            at: The offset where this line begins.

        Raises InputError, which names the line, if a line is invalid.
        """
        reader = reader or RecordReader()
        # This runs before each request to a served model, so it uses few system calls.
        file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            complete_lines = lines_from(file, at, os.fstat(file).st_size)
            for number_, text in enumerate(complete_lines, number):
                at += len(text) + 1
                try:
                    entry = reader.read(number_, text)
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    raise InputError(
                        Code.FILE_INVALID,
                        f"{self._path}: line {number_ + 1} is not a line of a record. Restore the "
                        "record from a copy.",
                    ) from None
                yield entry, at
        finally:
            os.close(file)


def _require_text(value: Any) -> str:
    """Returns a value of a line that must be a text. Raises TypeError if it is not."""
    if not isinstance(value, str):
        raise TypeError(f"not a text (got {value!r})")
    return value


def _require_number(value: Any, max_value: int = _MAX_NUMBER) -> int:
    """Returns a value of a line that must be an integer from 0 to ``max_value``.

    Raises TypeError or ValueError if it is not.
    """
    if not isinstance(value, int):
        raise TypeError(f"not an integer (got {value!r})")
    if not 0 <= value <= max_value:
        raise ValueError(f"not between 0 and {max_value} (got {value})")
    return value


def _parse_disclosure(
    number: int,
    line: dict[str, Any],
    way: Route,
    people_of_run: Mapping[tuple[str, int], tuple[str, int]],
    keys: Mapping[str, str],
) -> Disclosure:
    round_, batch = line["step"]
    payload, message, messages = line["bytes"]
    digest, rows = people_of_run.get((way.run, way.generation), ("", 0))
    about = line["rows"] if line["rows"] is None else _require_text(line["rows"])
    return Disclosure(
        number,
        float(line["at"]),
        way,
        tuple(map(_require_text, line["to"])),
        _require_number(round_),
        _require_number(batch),
        _require_number(line["numbers"]),
        _require_number(payload),
        _require_number(message),
        _require_number(messages),
        about,
        _require_text(line["digest"]),
        digest,
        rows,
        _require_number(line.get("asked", 0)),
        keys,
    )


@dataclass
class DisclosureSum:
    """The totals of the bundles that one peer got in one direction of an exchange.

    ``people`` counts each person once. ``of_person`` is the count of numbers about the person of a
    query, or None without a query.
    """

    bundles: int = 0
    numbers: int = 0
    payload_bytes: int = 0
    message_bytes: int = 0
    messages: int = 0
    first: float = np.inf
    last: float = 0.0
    of_person: int | None = None
    _people: dict[tuple[str, int], npt.NDArray[np.bool_]] = field(default_factory=dict)
    _tags: set[bytes] = field(default_factory=set)

    def add(self, disclosure: Disclosure) -> None:
        """Adds a bundle that the receiver got."""
        self.bundles += 1
        self.numbers += disclosure.numbers
        self.payload_bytes += disclosure.payload_bytes
        self.message_bytes += disclosure.message_bytes
        self.messages += disclosure.messages
        self.first, self.last = min(self.first, disclosure.at), max(self.last, disclosure.at)
        if disclosure.of_person is not None:
            self.of_person = (self.of_person or 0) + disclosure.of_person
        if (packed_tags := disclosure.tags) is not None:
            self._tags.update(packed_tags[0].tolist())
        elif disclosure.about not in (None, "", TOGETHER):
            people_key, rows = (disclosure.people, disclosure.table_rows), disclosure.rows
            if people_key not in self._people:
                self._people[people_key] = np.zeros(disclosure.table_rows, bool)
            self._people[people_key][rows] = True

    @property
    def people(self) -> int:
        """The number of different people in the bundles.

        If the runs had different tables of people, it is the maximum over the tables.
        """
        rows = (int(mask.sum()) for mask in self._people.values())
        return max(rows, default=0) + len(self._tags)

    @property
    def fields(self) -> dict[str, Any]:
        """The totals for JSON."""
        names = ("bundles", "numbers", "payload_bytes", "message_bytes", "messages")
        person_fields = {} if self.of_person is None else {"of_person": self.of_person}
        return {
            "people": self.people,
            **{name: getattr(self, name) for name in names},
            **person_fields,
        }


def sum_disclosures(of: Iterable[Disclosure]) -> dict[tuple[str, str, Route], DisclosureSum]:
    """Returns {(run, receiver, route): totals} of disclosures, ordered by the first bundle.

    The generations of a run are added up.
    """
    sums: dict[tuple[str, str, Route], DisclosureSum] = {}
    for disclosure in of:
        way = Route(**{**disclosure.way.fields, "generation": 0})
        for receiver in disclosure.to:
            sums.setdefault((way.run, receiver, way), DisclosureSum()).add(disclosure)
    return sums
