"""Reads a record: every bundle that has left, to whom, in which run, and about whom.

This is what a policy may ask before something leaves, too.
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
from vfl_party.record import people
from vfl_party.record.book import LINES, lines_from, secret_of
from vfl_party.record.lines import ALL, TAG, TOGETHER, Route, Rows, unpack_rows, unpack_tags

# The most names that a message lists; of runs, the newest.
_MAX_NAMES = 10
# The most rows, whose numbers have four bytes; and the most of anything else, so that sums fit.
_MAX_ROWS, _MAX_NUMBER = 2**32, 2**48


@dataclass(frozen=True)
class Disclosure:
    """One bundle that was about to leave.

    ``line``: its number in the record, from 0; ``at``: when, in seconds since 1970; ``to``: the
    receivers, each of which got the whole; ``numbers``: before the codec, to each receiver;
    ``payload_bytes``, ``message_bytes``, ``messages``: to each receiver, as the ledger counts them;
    ``about``: the rows, as the record writes them, of those that ``people`` names, or the tags of
    people; ``asked``: of the answer of a served model, the number of ids in the question, answered
    or not; ``keys``: {receiver: the pin of its key}, of those that have shown it; ``of_person``:
    the numbers about the person who was asked for.
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
        """The numbers of the rows that it tells of one by one, in ascending order; none if it has
        ``tags``. Raises InputError if the line was changed, and has no such numbers.
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
        raise self._wrong

    @property
    def tags(self) -> tuple[npt.NDArray[np.void], Rows] | None:
        """The tags of the people of whom it tells, and how often of each; None if it has the
        numbers of rows. Raises InputError if the line was changed.
        """
        try:
            return unpack_tags(self.about)
        except ValueError:
            raise self._wrong from None

    @property
    def people_told(self) -> int:
        """Of how many people it tells one by one. Raises InputError if the line was changed."""
        tagged = self.tags
        return len(np.unique(tagged[0] if tagged is not None else self.rows))

    @property
    def _wrong(self) -> InputError:
        return InputError(
            Code.FILE_INVALID,
            f"line {self.line + 1} of the record: refers to rows that do not exist. Restore the "
            "record from a copy.",
        )

    def of(self, times: int, among: int) -> Disclosure:
        """Returns it for a person of whom it tells ``times`` times, of ``among`` in all: the
        numbers are counted as the account counts them.
        """
        return replace(self, of_person=times * -(-self.numbers // among))

    @property
    def fields(self) -> dict[str, Any]:
        """The facts for JSON; without the rows, of which it has the count."""
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
    """A step of training with differential privacy that was about to be taken.

    ``cost``: of one step, for each person; ``steps``: so far, with this one, under the keys that
    ``of`` tells from others; ``to``: who learns what is computed with the model; ``people``,
    ``table_rows``: as in ``Disclosure``.
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
    """Reads one line after the other. ``known``: what later lines refer to, {(kind, name): the
    line}; a reader with the same goes on where another has ended.
    """

    def __init__(self, known: Mapping[tuple[str, str], dict[str, Any]] | None = None) -> None:
        self.known: dict[tuple[str, str], dict[str, Any]] = {}
        self._ways: dict[str, Route] = {}
        # {(run, generation): (digest of the rows' ids, number of rows)}.
        self._whose: dict[tuple[str, int], tuple[str, int]] = {}
        self._keys: dict[str, str] = {}
        for line in (known or {}).values():
            self._refer(line)

    def read(self, number: int, text: bytes) -> Disclosure | PrivateStep | None:
        """Returns what a line tells of; None if it only says what later ones refer to. Raises
        ValueError, KeyError, TypeError, AttributeError or RecursionError if it is none of a record.
        """
        line = json.loads(text)
        if not isinstance(line, dict):
            raise TypeError
        if "sent" in line:
            way = self._ways[line["sent"]]
            return _disclosure(number, line, way, self._whose, self._keys)
        if "private" in line:
            run = _word(line["run"]), _number(line["generation"])
            whose = self._whose.get(run, ("", 0))
            to = tuple(map(_word, line["to"]))
            phase, cost, of = (_word(line[name]) for name in ("private", "cost", "of"))
            return PrivateStep(*run, phase, cost, _number(line["steps"]), of, to, *whose)
        self._refer(line)
        return None

    def _refer(self, line: dict[str, Any]) -> None:
        if "way" in line:
            names = line.keys() & Route.__dataclass_fields__
            words: dict[str, Any] = {name: _word(line[name]) for name in names - {"generation"}}
            self._ways[line["way"]] = Route(generation=_number(line["generation"]), **words)
            self.known["way", line["way"]] = line
        elif "people" in line:
            of = _word(line["run"]), _number(line["generation"])
            bytes.fromhex(line["people"])
            self._whose[of] = line["people"], _number(line["rows"], _MAX_ROWS)
            self.known["people", f"{of[0]}/{of[1]}"] = line
        elif "head" in line:
            self._keys = {**self._keys, _word(line["head"]): _word(line["key"])}
            self.known["head", line["head"]] = line
        elif "run" in line:
            self._keys = {**self._keys, **line["keys"]}
            self.known["run", ""] = line


class RecordHistory:
    """The lines of a party's record, as they are now.

    Args:
        folder: of the record.

    Raises InputError if there is none.
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
        """Yields what has left, the oldest first; only what fits, if something is asked for. Raises
        InputError that names the line if one cannot be read.
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

    def check_known(self, **asked: str | None) -> None:
        """Raises InputError if nothing in the record has the ``run``, ``peer``, ``phase`` or
        ``kind`` that is asked for: a typing error must not read as if nothing had left.
        """
        known: dict[str, set[str]] = {name: set() for name, value in asked.items() if value}
        if not known:
            return
        for disclosure in self._all():
            for name, values in known.items():
                values.update(disclosure.to if name == "peer" else [getattr(disclosure.way, name)])
        for name, values in known.items():
            if asked[name] not in values:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"{self._folder}: the record has no {name} {asked[name]}. Choose one of: "
                    f"{list_names(sorted(values)[-_MAX_NAMES:]) or 'none'}.",
                )

    def about(self, spellings: Collection[str], of: Iterable[Disclosure]) -> Iterator[Disclosure]:
        """Yields those of some disclosures that tell of one person alone, by ``rows``, with how
        many of the numbers are about the person.

        ``spellings``: the person's id, as the runs have spelt it. Raises InputError.
        """
        secret = secret_of(self._folder)
        tags = [people.tag(secret, spelling) for spelling in spellings]
        if not tags:
            return
        places: dict[str, Rows] = {}
        wanted = np.frombuffer(b"".join(tags), TAG)
        for disclosure in of:
            if (tagged := disclosure.tags) is not None:
                row_tags, often = tagged
                times = int(often[np.isin(row_tags, wanted)].sum())
                if times:
                    yield disclosure.of(times, int(often.sum()))
                continue
            if not disclosure.people or not disclosure.about:
                continue
            if disclosure.people not in places:
                places[disclosure.people] = np.concatenate(
                    [people.rows_of(self._folder, disclosure.people, tag) for tag in tags]
                )
            rows = disclosure.rows
            times = int(np.isin(rows, places[disclosure.people]).sum())
            if times:
                yield disclosure.of(times, len(rows))

    def runs_with(self, spellings: Collection[str]) -> dict[str, bool]:
        """Returns {run: whether a person was among its rows}, of the runs whose rows the record
        lists: those that the phases of a generation worked with, in training, validation or test.

        ``spellings``: the person's id, as the runs have spelt it. Raises InputError.
        """
        reader, secret = RecordReader(), secret_of(self._folder)
        for _ in self.lines(reader):
            pass
        tags = [people.tag(secret, spelling) for spelling in spellings]
        runs: dict[str, bool] = {}
        for (kind, _), line in reader.known.items():
            if kind != "people" or line["what"] != "aligned":
                continue
            run, digest = line["run"], line["people"]
            has = any(len(people.rows_of(self._folder, digest, tag)) for tag in tags)
            runs[run] = runs.get(run, False) or has
        return runs

    def _all(self) -> Iterator[Disclosure]:
        return (entry for entry, _ in self.lines() if isinstance(entry, Disclosure))

    def lines(
        self, reader: RecordReader | None = None, number: int = 0, at: int = 0
    ) -> Iterator[tuple[Disclosure | PrivateStep | None, int]]:
        """Yields what each whole line tells of, and where the line ends in the file.

        ``reader``: has read the first ``number`` lines, which end at ``at``. Raises InputError that
        names the line if one cannot be read.
        """
        reader = reader or RecordReader()
        # This runs before each request to a served model, so it takes few calls.
        file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            whole = lines_from(file, at, os.fstat(file).st_size)
            for number_, text in enumerate(whole, number):
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


def _word(value: Any) -> str:
    """Returns a text of a line. Raises TypeError if it is none."""
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _number(value: Any, max_value: int = _MAX_NUMBER) -> int:
    """Returns a number of a line, from 0. Raises TypeError, or ValueError if it is too large."""
    if not isinstance(value, int):
        raise TypeError(value)
    if not 0 <= value <= max_value:
        raise ValueError(value)
    return value


def _disclosure(
    number: int,
    line: dict[str, Any],
    way: Route,
    whose: Mapping[tuple[str, int], tuple[str, int]],
    keys: Mapping[str, str],
) -> Disclosure:
    round_, batch = line["step"]
    payload, message, messages = line["bytes"]
    digest, rows = whose.get((way.run, way.generation), ("", 0))
    about = line["rows"] if line["rows"] is None else _word(line["rows"])
    return Disclosure(
        number,
        float(line["at"]),
        way,
        tuple(map(_word, line["to"])),
        _number(round_),
        _number(batch),
        _number(line["numbers"]),
        _number(payload),
        _number(message),
        _number(messages),
        about,
        _word(line["digest"]),
        digest,
        rows,
        _number(line.get("asked", 0)),
        keys,
    )


@dataclass
class DisclosureSum:
    """What one peer got in one exchange of a run: ``people`` are counted once, each.

    ``of_person``: the numbers about the person of a query; None without one.
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
        """Adds one bundle, as one receiver got it."""
        self.bundles += 1
        self.numbers += disclosure.numbers
        self.payload_bytes += disclosure.payload_bytes
        self.message_bytes += disclosure.message_bytes
        self.messages += disclosure.messages
        self.first, self.last = min(self.first, disclosure.at), max(self.last, disclosure.at)
        if disclosure.of_person is not None:
            self.of_person = (self.of_person or 0) + disclosure.of_person
        if (tagged := disclosure.tags) is not None:
            self._tags.update(tagged[0].tolist())
        elif disclosure.about not in (None, "", TOGETHER):
            of, rows = (disclosure.people, disclosure.table_rows), disclosure.rows
            if of not in self._people:
                self._people[of] = np.zeros(disclosure.table_rows, bool)
            self._people[of][rows] = True

    @property
    def people(self) -> int:
        """The number of rows disclosed one by one; if the table of ids has changed, the maximum."""
        rows = (int(mask.sum()) for mask in self._people.values())
        return max(rows, default=0) + len(self._tags)

    @property
    def fields(self) -> dict[str, Any]:
        """The sums for JSON."""
        names = ("bundles", "numbers", "payload_bytes", "message_bytes", "messages")
        asked = {} if self.of_person is None else {"of_person": self.of_person}
        return {"people": self.people, **{name: getattr(self, name) for name in names}, **asked}


def sum_disclosures(of: Iterable[Disclosure]) -> dict[tuple[str, str, Route], DisclosureSum]:
    """Returns {(run, receiver, what left): the sum}, in the order in which they began. Generations
    of a run are summed.
    """
    sums: dict[tuple[str, str, Route], DisclosureSum] = {}
    for disclosure in of:
        way = Route(**{**disclosure.way.fields, "generation": 0})
        for receiver in disclosure.to:
            sums.setdefault((way.run, receiver, way), DisclosureSum()).add(disclosure)
    return sums
