"""Writes the lines of one run to the party's record.

The lines have the run, the people in its rows, and every bundle before it is sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy.typing as npt

from vfl_common.bundle import Buffer, Bundle, DType, Kind, StepKey
from vfl_common.errors import Code, PeerError
from vfl_common.files import lock_folder
from vfl_common.frames import BundleSizes
from vfl_common.rpc.serving.stream import OutgoingMessage
from vfl_common.stages import Job
from vfl_party.record.book import RecordBook
from vfl_party.record.heads import HeadExchange
from vfl_party.record.history import Disclosure, PrivateStep
from vfl_party.record.lines import BundleForm, Route, pack_rows, pack_tags, tag_person, write_people

# The names of the texts that describe a direction of an exchange. The last ones may be missing.
_ROUTE_FIELDS = ("exchange", "direction", "what", "chain", "how", "cost")


class LeaveCheck(Protocol):
    """The type of a check that decides whether an entry may be added to the record."""

    def __call__(self, entry: Disclosure | PrivateStep, /) -> None:
        """Raises InputError if the bundle may not be sent or the step may not be taken."""
        ...

    def wrote(self, entry: Disclosure | PrivateStep, begin: int, end: int, /) -> None:
        """Is called after the line of an entry was written at the offsets ``begin`` to ``end``."""
        ...


@dataclass(slots=True)
class _DeclaredRoute:
    """A route that the record declares, its key in the record, and the form of its last bundle."""

    key: str
    way: Route
    form: BundleForm


class _BundleContent(NamedTuple):
    """The content of a bundle as its line describes it."""

    kind: str
    # The count of numbers before the codec.
    numbers: int
    # The rows or people, encoded by ``pack_rows`` or ``pack_tags``.
    about: str | None
    size: BundleSizes | None = None
    # The number of ids in a request to a served model.
    asked: int = 0


@dataclass(frozen=True)
class RecordedRun:
    """One generation of a recorded run. ``recipe``: The digest of the run's recipe."""

    run_id: str
    generation: int
    job: Job | Literal["serve"]
    recipe: str


class Recorder:
    """Writes the bundles that the party sends in one generation of a run to its record.

    Args:
        book: The party's record.
        heads: Exchanges the heads of the party's record and of the peers' records.
        run: The generation of the run.
        keys: {peer: pin of its key} for the peers that the party file pins.
        asks_for: The peers that must send the head of their record before they get anything.
        whole: Whether digests include all bytes of large tensors.
        allows: The checks that are called before a line is written.
    """

    def __init__(
        self,
        book: RecordBook,
        heads: HeadExchange,
        run: RecordedRun,
        *,
        keys: Mapping[str, str],
        asks_for: Iterable[str] = (),
        whole: bool = False,
        allows: Sequence[LeaveCheck] = (),
    ) -> None:
        self.book, self.heads = book, heads
        self._run: dict[str, Any] = {
            "run": run.run_id,
            "generation": run.generation,
            "job": run.job,
        }
        self._asks_for, self._whole = frozenset(asks_for), whole
        self._allows = allows
        self._ways: dict[tuple[str, ...], _DeclaredRoute] = {}
        # The number of rows and the digest of the table of people.
        self._rows, self._people = 0, ""
        self.book.add(**self._run, recipe=run.recipe, keys=dict(keys))

    def people(self, ids: Iterable[str], what: str) -> None:
        """Writes the table of people to which the row numbers of later lines refer.

        Args:
            ids: The ids of the rows, in the order of the row numbers.
            what: ``table`` for the party's whole table, ``aligned`` for the rows of the phases.
        """
        self._people, self._rows = write_people(self.book.folder, self.book.secret, ids)
        self.book.add(people=self._people, rows=self._rows, what=what, **self._run)

    def leaves(
        self,
        way: Sequence[str],
        step: StepKey,
        bundle: Bundle,
        to: Sequence[str],
        *,
        numbers: int,
        rows: Sequence[int] | npt.NDArray[Any] | str | None,
    ) -> None:
        """Writes the line of a bundle before it is sent.

        Args:
            way: The name of the exchange, the direction, the tensors, the chain, ``how`` and
                ``cost`` as texts; see ``Route``.
            step: The step in which the bundle is sent.
            bundle: The bundle.
            to: The receivers. Each gets the whole bundle.
            numbers: The count of numbers in the bundle before the codec.
            rows: The row numbers in the bundle, or None if it is not about single rows.

        Raises InputError if the line cannot be written, and PeerError if a receiver has not sent
        the head of its record.
        """
        for peer in to:
            if peer not in self._asks_for or peer in self.heads.met:
                continue
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{peer}: did not send the head of its record, so nothing is sent to it",
                party=peer,
            )
        about = pack_rows(rows, self._rows)
        with self._lock_if_checked():
            self._write_bundle(
                way, step, bundle, to, _BundleContent(bundle.kind.label, numbers, about)
            )

    def tells(self, way: Sequence[str], outgoing: OutgoingMessage) -> None:
        """Writes the line of an answer of a served model before it is sent.

        The line has the tag of each id, whether or not the id is in the party's table. Raises the
        errors of ``leaves``.
        """
        secret = self.book.secret
        about = pack_tags(
            b"".join([tag_person(secret, person) for person in outgoing.ids]), outgoing.times
        )
        content_bytes = memoryview(outgoing.content)
        bundle = Bundle(
            Kind.ROWS, {outgoing.kind: Buffer(DType.UINT8, (len(content_bytes),), content_bytes)}
        )
        size = BundleSizes(outgoing.payload_bytes, outgoing.message_bytes, 1)
        step = StepKey(outgoing.phase, outgoing.scoring, outgoing.place)
        with self._lock_if_checked():
            content = _BundleContent(outgoing.kind, outgoing.numbers, about, size, outgoing.asked)
            self._write_bundle(way, step, bundle, (outgoing.to,), content)

    def _lock_if_checked(self) -> AbstractContextManager[None]:
        """Locks the record from the check of an entry until its line is written.

        Otherwise two programs could both send bundles of which only one is allowed.
        """
        return lock_folder(self.book.folder) if self._allows else nullcontext()

    def _write_bundle(
        self,
        way: Sequence[str],
        step: StepKey,
        bundle: Bundle,
        to: Sequence[str],
        content: _BundleContent,
    ) -> None:
        kind, numbers, about, size, asked = content
        # Declarations and forms are cached, because this runs at every step.
        declared = self._ways.get((step.phase, kind, *way))
        if declared is None:
            declared = self._declare(step.phase, kind, way, BundleForm(bundle, self.book.secret))
        # Another thread may replace ``declared.form`` in the meantime.
        form, receivers = declared.form, '","'.join(to)
        if not form.is_of(bundle):
            form = declared.form = BundleForm(bundle, self.book.secret)
        size = size or form.sizes(step, bundle)
        # These are integers, because formatting a float takes longer.
        at_s, at_ms = divmod(time.time_ns() // 1_000_000, 1000)
        disclosure = None
        if self._allows:
            disclosure = Disclosure(
                line=-1,
                at=at_s + at_ms / 1000,
                way=declared.way,
                to=tuple(to),
                round=step.round,
                batch=step.batch,
                numbers=numbers,
                payload_bytes=size.payload_bytes,
                message_bytes=size.message_bytes,
                messages=size.messages,
                about=about,
                digest="",
                people=self._people,
                table_rows=self._rows,
                asked=asked,
            )
            for allow in self._allows:
                allow(disclosure)
        # This builds JSON without json.dumps, because it runs at every step.
        rows_json = "null" if about is None else f'"{about}"'
        asked_json = f'"asked":{asked},' if asked else ""
        text = (
            f'{{"sent":"{declared.key}","step":[{step.round},{step.batch}],"to":["{receivers}"],'
            f'"numbers":{numbers},"bytes":[{size.payload_bytes},{size.message_bytes},'
            f'{size.messages}],"rows":{rows_json},'
            f'"digest":"{form.digest(step, bundle, whole=self._whole)}",'
            f"{asked_json}"
            f'"at":{at_s}.{at_ms:03d}}}'
        )
        offsets = self.book.add_line(text)
        if disclosure is not None:
            for allow in self._allows:
                allow.wrote(disclosure, *offsets)

    def spends(self, phase: str, cost: str, steps: int, of: str, to: Sequence[str]) -> None:
        """Writes the line of a step of training with differential privacy before it is taken.

        Args:
            phase: The name of the phase.
            cost: The privacy cost of one step for each person, a ``Mechanism`` as text.
            steps: The number of steps with the same sampling and noise keys, including this one.
            of: Identifies these keys.
            to: The parties that learn results computed with the model.

        Raises the errors of ``leaves``.
        """
        with self._lock_if_checked():
            for allow in self._allows:
                allow(
                    PrivateStep(
                        run=self._run["run"],
                        generation=self._run["generation"],
                        phase=phase,
                        cost=cost,
                        steps=steps,
                        of=of,
                        to=tuple(to),
                        people=self._people,
                        table_rows=self._rows,
                    )
                )
            self.book.add(private=phase, cost=cost, steps=steps, of=of, to=[*to], **self._run)

    def _declare(
        self, phase: str, kind: str, way: Sequence[str], form: BundleForm
    ) -> _DeclaredRoute:
        route_fields: dict[str, Any] = dict(zip(_ROUTE_FIELDS, way, strict=False))
        declared = Route(phase=phase, kind=kind, **route_fields, **self._run)
        entry = self._ways[phase, kind, *way] = _DeclaredRoute(declared.key, declared, form)
        self.book.add(way=entry.key, **declared.fields)
        return entry


class ServingRecord:
    """Writes the answers of a served model to the record. Any thread may call it.

    ``way``: See ``Recorder.leaves``.
    """

    def __init__(self, recorder: Recorder, way: Sequence[str]) -> None:
        self._recorder, self._way, self._writing = recorder, way, threading.Lock()

    def __call__(self, outgoing: OutgoingMessage) -> None:
        """Writes the line of an answer. Raises InputError if the answer may not be sent."""
        with self._writing:
            self._recorder.tells(self._way, outgoing)
