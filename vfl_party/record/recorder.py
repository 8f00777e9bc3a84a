"""What one process of a party writes into the party's record: the run, whose rows they are, and
every bundle before it is sent.
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
from vfl_common.rpc.serving.answered import OutgoingMessage
from vfl_common.stages import Job
from vfl_common.wire.frames import BundleSizes
from vfl_party.record import people
from vfl_party.record.book import RecordBook
from vfl_party.record.heads import HeadExchange
from vfl_party.record.history import Disclosure, PrivateStep
from vfl_party.record.lines import BundleForm, Route, pack_rows, pack_tags

# The fields of a way, in this order; the last ones may be left out.
_WORDS = ("exchange", "direction", "what", "chain", "how", "cost")


class LeaveCheck(Protocol):
    """Decides what may leave, and hears of what was written."""

    def __call__(self, entry: Disclosure | PrivateStep, /) -> None:
        """Raises InputError if something may not leave."""
        ...

    def wrote(self, entry: Disclosure | PrivateStep, begin: int, end: int, /) -> None:
        """Called when the line of something is written, from ``begin`` to ``end`` in the file."""
        ...


@dataclass(slots=True)
class _Declared:
    """A way that is declared in the record: its key there, and the form of its last bundle."""

    key: str
    way: Route
    form: BundleForm


class _Content(NamedTuple):
    """What a line says of a bundle's content: its kind, the count of its numbers before the codec,
    its rows as ``lines.packed`` writes them, its size if known, and the number of ids asked for.
    """

    kind: str
    numbers: int
    about: str | None
    size: BundleSizes | None = None
    asked: int = 0


@dataclass(frozen=True)
class RecordedRun:
    """One generation of what is run. ``recipe``: the digest of its recipe."""

    run_id: str
    generation: int
    job: Job | Literal["serve"]
    recipe: str


class Recorder:
    """Writes what leaves in one generation of a run.

    Args:
        book: the party's record.
        heads: of it and of the peers' records.
        run: what is run.
        keys: {peer: the pin of its key}, as far as the party file pins them.
        asks_for: the peers that must have shown their records before anything is sent to them.
        whole: whether digests take all bytes of large tensors.
        allows: asked before a line is written.
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
        allows: LeaveCheck | None = None,
    ) -> None:
        self.book, self.heads = book, heads
        self._run: dict[str, Any] = {
            "run": run.run_id,
            "generation": run.generation,
            "job": run.job,
        }
        self._asks_for, self._whole = frozenset(asks_for), whole
        self._allows = allows
        self._ways: dict[tuple[str, ...], _Declared] = {}
        # The number of rows, and the digest of their ids.
        self._rows, self._people = 0, ""
        self.book.add(**self._run, recipe=run.recipe, keys=dict(keys))

    def people(self, ids: Iterable[str], what: str) -> None:
        """Notes whose the rows are that later lines count, in the order of their numbers. ``what``:
        ``table``, this party's own; ``aligned``, those that the phases work with.
        """
        self._people, self._rows = people.keep(self.book.folder, self.book.secret, ids)
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
        """Writes that a bundle is about to leave. Raises InputError if that cannot be written,
        PeerError if a receiver has not shown its record.

        Args:
            way: the exchange's name, the direction, the tensors, the chain, ``how`` and ``cost``,
                in words.
            to: the receivers; each gets the whole bundle.
            numbers: in it, before the codec.
            rows: the rows that it tells of; None: no single rows.
        """
        for peer in to:
            if peer not in self._asks_for or peer in self.heads.met:
                continue
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{peer}: did not show the head of its record, and gets nothing before it does",
                party=peer,
            )
        about = pack_rows(rows, self._rows)
        with self._alone():
            self._write(way, step, bundle, to, _Content(bundle.kind.label, numbers, about))

    def tells(self, way: Sequence[str], outgoing: OutgoingMessage) -> None:
        """Writes what a serving program is about to send about ids. It takes any id, known before
        or not, and writes its tag. Raises InputError as ``leaves``.
        """
        secret = self.book.secret
        about = pack_tags(
            b"".join([people.tag(secret, person) for person in outgoing.ids]), outgoing.times
        )
        data = memoryview(outgoing.content)
        bundle = Bundle(Kind.ROWS, {outgoing.kind: Buffer(DType.UINT8, (len(data),), data)})
        size = BundleSizes(outgoing.payload_bytes, outgoing.message_bytes, 1)
        step = StepKey(outgoing.phase, outgoing.scoring, outgoing.place)
        with self._alone():
            content = _Content(outgoing.kind, outgoing.numbers, about, size, outgoing.asked)
            self._write(way, step, bundle, (outgoing.to,), content)

    def _alone(self) -> AbstractContextManager[None]:
        """Locks the record from the question whether something may leave until its line is written:
        otherwise two bundles may leave that are not allowed together.
        """
        return lock_folder(self.book.folder) if self._allows is not None else nullcontext()

    def _write(
        self,
        way: Sequence[str],
        step: StepKey,
        bundle: Bundle,
        to: Sequence[str],
        content: _Content,
    ) -> None:
        kind, numbers, about, size, asked = content
        # All tensors of a bundle cost something, and there may be fewer than before.
        declared = self._ways.get((step.phase, kind, *way))
        if declared is None:
            declared = self._declare(step.phase, kind, way, BundleForm(bundle, self.book.secret))
        # Another thread may put another form there meanwhile.
        form, receivers = declared.form, '","'.join(to)
        if not form.is_of(bundle):
            form = declared.form = BundleForm(bundle, self.book.secret)
        size = size or form.sizes(step, bundle)
        # Integers, because formatting a float takes longer.
        at_s, at_ms = divmod(time.time_ns() // 1_000_000, 1000)
        disclosure = None
        if self._allows is not None:
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
            self._allows(disclosure)
        # Written by hand, because it is done at every step.
        whose = "null" if about is None else f'"{about}"'
        of_question = f'"asked":{asked},' if asked else ""
        text = (
            f'{{"sent":"{declared.key}","step":[{step.round},{step.batch}],"to":["{receivers}"],'
            f'"numbers":{numbers},"bytes":[{size.payload_bytes},{size.message_bytes},'
            f'{size.messages}],"rows":{whose},'
            f'"digest":"{form.digest(step, bundle, whole=self._whole)}",'
            f"{of_question}"
            f'"at":{at_s}.{at_ms:03d}}}'
        )
        place = self.book.add_line(text)
        if self._allows is not None and disclosure is not None:
            self._allows.wrote(disclosure, *place)

    def spends(self, phase: str, cost: str, steps: int, of: str, to: Sequence[str]) -> None:
        """Writes that a step of training with differential privacy is about to be taken. Raises as
        ``leaves``.

        Args:
            cost: of one step, for each person: a ``Mechanism``.
            steps: so far, with this one, under the same keys of samples and noise.
            of: tells these keys from others.
            to: who learns what is computed with the model.
        """
        with self._alone():
            if self._allows is not None:
                self._allows(
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

    def _declare(self, phase: str, kind: str, way: Sequence[str], form: BundleForm) -> _Declared:
        words: dict[str, Any] = dict(zip(_WORDS, way, strict=False))
        declared = Route(phase=phase, kind=kind, **words, **self._run)
        entry = self._ways[phase, kind, *way] = _Declared(declared.key, declared, form)
        self.book.add(way=entry.key, **declared.fields)
        return entry


class ServingRecord:
    """Writes what leaves while one run is served; any thread may call it. ``way``: see
    ``Recorder.leaves``.
    """

    def __init__(self, recorder: Recorder, way: Sequence[str]) -> None:
        self._recorder, self._way, self._writing = recorder, way, threading.Lock()

    def __call__(self, outgoing: OutgoingMessage) -> None:
        """Writes that an answer is about to be sent. Raises InputError if it may not leave."""
        with self._writing:
            self._recorder.tells(self._way, outgoing)
