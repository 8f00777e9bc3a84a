"""Private set intersection: the parties find the rows that all of them hold, and reveal no other
row to each other.

The protocol is Diffie-Hellman on Curve25519 among any number of parties and the aggregation server.
All must follow the protocol, and the server must not collude with a party. With the keys a, b, c of
the parties A (active), B and C:

    round 1    A -> B: A's rows, masked by a      B -> C: masked by b         C -> A: masked by c
    round 2    C's rows, masked by c and a        A's rows, by a and b        B's rows, by b and c
    round 3    the last party to mask a set sends its tags to the server: A sends tags of B's
               rows, B of C's rows, C of A's rows

Each owner shuffles its rows once, and nobody changes that order. The server compares the tags, and
reports to each owner which of its rows are common. No party ever sees two sets under the same keys,
so no party can compare sets. The server sees all sets, masked by all keys. It learns the sizes of
the sets and of their overlaps, but no id. Messages from B to C pass through A, so they are sealed
for C (``vfl_party.psi.sealed``). ``docs/security/private-alignment.md`` says who learns what.

With ``rows.partial`` the server reports to a passive party which of its rows the active party
holds, and to the active party which of its rows each passive party holds.
``vfl_party.align.partial`` then compares and orders these rows.

The rows are sent in batches, one batch per step. Every party stores masked points on its disk, and
the server stores the tags. So neither needs much memory, and if a process is killed, only the
batches in work are lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from vfl_common.config.recipe import Recipe
from vfl_common.config.recipe_tables import RowsSettings
from vfl_common.errors import AbortedError, Code, InputError, PeerError
from vfl_common.psi import compute_min_common, make_too_few_error
from vfl_party.align import batches
from vfl_party.align.aligned import AlignedRows, AlignmentContext
from vfl_party.align.buckets import BucketRounds
from vfl_party.align.digest import DigestAlignment
from vfl_party.align.exchanges import occurrences, rr22_occurrences
from vfl_party.align.meeting import MIN_ROWS, Engine, Meeting
from vfl_party.align.partial import PartialRows
from vfl_party.align.ring import PsiRing
from vfl_party.align.rounds import KnownRounds, Rounds
from vfl_party.align.state import AlignmentFiles, CommonRows
from vfl_party.data import Table
from vfl_party.data.ids import Ids
from vfl_party.data.passes import KeyPasses, Matches
from vfl_party.outbound.declared import Occurrence
from vfl_party.outbound.exchange import Connections
from vfl_party.outbound.policies import Policy
from vfl_party.rr22 import relay

log = logging.getLogger(__name__)
REMEDY = "To align again, remove the folder 'alignment' of the run at either party."


class _Result(NamedTuple):
    """The common rows of all passes. ``common``: The rows by position in the party's table."""

    matches: Matches
    common: CommonRows

    def select(self, table: Table) -> Table:
        """Returns the common rows of a table, with the ids that all parties use."""
        return table.select(self.matches.rows, Ids.of(self.matches.ids))

    def add_to(self, aligned: AlignedRows) -> AlignedRows:
        """Returns ``aligned`` with the positions of its rows and the keys that matched them."""
        return replace(aligned, rows=self.matches.rows, keys=self.matches.keys)


# (number of the pass, context with its rows, its files) -> the common rows, or None.
_Find = Callable[[int, AlignmentContext, AlignmentFiles], CommonRows | None]


class PsiAlignment:
    """Private set intersection; see ``Alignment``."""

    certain = False
    protocol = 8

    def __init__(self, recipe: Recipe, policy: Policy, *, divides: bool = True) -> None:
        self._recipe, self._policy, self._divides = recipe, policy, divides
        self._digest = DigestAlignment(recipe, policy, divides=divides, remedy=REMEDY)
        self._partial: PartialRows | None = None
        if recipe.rows.partial:
            self._partial = PartialRows(recipe, policy, divides=divides, remedy=REMEDY)

    def occurrences(self, rows: int) -> list[Occurrence]:
        """See ``Alignment.occurrences``. With several keys, each pass has at most ``rows`` rows."""
        # A forecast of rr22 does not need its engine.
        engine, result = self._recipe.rows.psi.engine, list[Occurrence]()
        uses_rr22 = engine == "rr22" or (rows >= MIN_ROWS and self._choose_engine(1) == "auto")
        for number in range(max(1, len(self._recipe.rows.keys))):
            if uses_rr22:
                result += rr22_occurrences(rows, number)
            else:
                result += occurrences(1 + len(self._recipe.passives), rows, number)
        return [*result, *(self._partial or self._digest).occurrences(rows)]

    def _choose_engine(self, minimum: int) -> Engine:
        """Returns the engines that this party offers.

        With ``"auto"`` it does not offer rr22 if a minimum number of common rows is required,
        because with rr22 a party learns the common rows before it can count them. ``minimum``: The
        number that this party requires. Raises InputError if the recipe asks for rr22 and this
        party lacks it.
        """
        engine = self._recipe.rows.psi.engine
        if engine == "rr22":
            relay.require_engine()
        if engine != "auto":
            return engine
        suits = len(self._recipe.passives) == 1 and self._partial is None
        needs_all = self._recipe.rows.at_least == 1 and minimum == 1
        return "auto" if suits and needs_all and not relay.explain_absence() else "x25519"

    def describe(self) -> str:
        """Returns a text for people about the engine. Raises InputError if the recipe asks for rr22
        and this party lacks it.
        """
        engine = self._choose_engine(1)
        if engine == "x25519":
            return "x25519; the server tells all parties at the same time which rows are common"
        active = self._recipe.active.name
        first = (
            f"both parties must be honest-but-curious, and {active} learns the common rows first"
        )
        if engine == "rr22":
            return f"rr22; {first}"
        return (
            f"rr22 if the other party offers it and one party has {MIN_ROWS:,} rows, else x25519; "
            f"with rr22 {first}"
        )

    def get_expected(self, table: Table) -> AlignedRows:
        """See ``Alignment.get_expected``."""
        return self._digest.get_expected(table)

    def get_agreed(self, context: AlignmentContext) -> AlignedRows:
        """See ``Alignment.get_agreed``."""
        saved = self._load(context)
        if saved is None and self._recipe.passives:
            raise InputError(
                Code.DATA_INVALID,
                f"{context.folder}: the common rows are missing, and the other parties are in the "
                "middle of the run. Restore the folder and the rows that it had.",
            )
        if saved is not None and self._partial is not None:
            return self._partial.restore(context, self._select_wanted(saved.common))
        if saved is None:
            return self._digest.get_expected(context.table).with_saved_division(context.folder)
        expected = self._digest.get_expected(saved.select(context.table))
        return saved.add_to(expected.with_saved_division(context.folder))

    def show(self, context: AlignmentContext, aligned: AlignedRows) -> None:
        """See ``Alignment.show``."""
        saved = self._load(context)
        rows = self._partial if self._partial is not None and saved is not None else self._digest
        salt = context.salt if saved is None else saved.common.salt
        rows.show(replace(context, salt=salt), aligned)

    def _load(self, context: AlignmentContext) -> _Result | None:
        """Returns the common rows, if this party has saved them."""
        if not self._recipe.passives:
            return None
        return self._run_passes(context, lambda _number, _sub, files: files.common())

    def _run_passes(
        self, context: AlignmentContext, find: _Find, *, report: bool = False
    ) -> _Result | None:
        """Returns the common rows of all passes; None if ``find`` returns None for one of them.

        ``report``: Whether to log the numbers of rows of each key.
        """
        passes, commons = KeyPasses(context.table, context.name), list[CommonRows]()
        for number in range(passes.count):
            sub = replace(context, table=passes.select(number))
            common = find(number, sub, self._open_files(sub, number))
            if common is None:
                return None
            commons.append(common)
            passes.add(common.rows)
            if report:
                self._report_pass(number, common, passes)
        matches = passes.matches
        if not self._recipe.rows.keys:
            return _Result(matches, commons[0])
        return _Result(matches, CommonRows(matches.mark(len(context.table)), commons[0].salt))

    def _report_pass(self, number: int, common: CommonRows, passes: KeyPasses) -> None:
        names = self._recipe.rows.key_names
        log.info(
            "key %d of %d (%s): %d of %d rows are common to all parties; %d more rows share the "
            "key with another row",
            number + 1,
            len(names),
            names[number],
            common.rows.sum(),
            passes.selected,
            passes.shared,
            extra={"event": "matched"},
        )

    def _open_files(self, context: AlignmentContext, number: int) -> AlignmentFiles:
        """Opens the files of a pass with the rows ``context.table``."""
        has_holders = self._partial is not None and context.name == self._recipe.active.name
        holders = [party.name for party in self._recipe.passives] if has_holders else []
        pass_number = number if self._recipe.rows.keys else None
        return AlignmentFiles(
            context.folder, context.table.ids, batches.BATCH, holders, pass_number
        )

    def _select_wanted(self, common: CommonRows) -> CommonRows:
        """Returns the rows to use. For predictions, an active party with features uses all its
        rows.
        """
        if self._divides or not (common.holders and self._recipe.active.features):
            return common
        return replace(common, rows=np.ones_like(common.rows))

    def count_earlier(self, runs: Path, name: str, table: Table) -> int | None:
        """Returns the number of common rows of the run that ``rows.alignment`` names; None if the
        recipe names no run.

        ``runs``: The folder with all runs of the party. Raises InputError if that run cannot be
        used; PeerError if it has too few rows.
        """
        rows = self._recipe.rows
        if rows.alignment is None or not self._divides:
            return None
        run = runs / rows.alignment / name
        context = AlignmentContext(name, "", table, runs, cast(Connections, None))
        result = self._run_passes(context, lambda _number, _sub, files: files.common_of(run))
        assert result is not None  # noqa: S101 - common_of raises an error
        _require_enough(rows, result.common.rows)
        return len(result.matches.rows)

    def align(self, context: AlignmentContext) -> AlignedRows:
        """Finds the common rows, unless they are already saved, and compares them as
        ``DigestAlignment`` does.

        Raises:
            PeerError: ROWS_DIFFER if there are fewer rows than ``rows.at_least`` or
                ``context.at_least``; REFUSED if a party has more rows than
                ``context.peer_rows_at_most``; another code if a party or the server breaks the
                protocol.
            InputError: The file of an earlier alignment does not fit this party's rows.
        """
        if not self._recipe.passives:
            return self._digest.align(context)
        known, opened = self._count_known(context), list[AlignmentFiles]()

        def find(number: int, sub: AlignmentContext, files: AlignmentFiles) -> CommonRows:
            opened.append(files)
            return self._run_pass(sub, files, number, known)

        result = self._run_passes(context, find, report=bool(self._recipe.rows.keys))
        assert result is not None  # noqa: S101 - a pass returns rows or raises an error
        if self._recipe.rows.keys:
            try:
                self._check_enough(result.common.rows, context)
            except PeerError:
                for files in opened:
                    files.forget()
                raise
            # Phases on the rows that are not common read which rows any pass has matched.
            union = AlignmentFiles(context.folder, context.table.ids, batches.BATCH)
            union.finish(result.common)
        salted = replace(context, salt=result.common.salt)
        if self._partial is not None:
            aligned = self._partial.align(salted, self._select_wanted(result.common))
        else:
            compared = self._digest.align(replace(salted, table=result.select(context.table)))
            aligned = result.add_to(compared)
        # All parties have saved the common rows, so the masked points are no longer needed.
        for files in opened:
            files.clear()
        return aligned

    def _count_known(self, context: AlignmentContext) -> int:
        """Returns the number of passes whose common rows this party knows, from this run or from
        the run that ``rows.alignment`` names.

        Raises InputError if that run cannot be used; PeerError if it has too few rows.
        """
        earlier, known = self._recipe.rows.alignment if self._divides else None, 0

        def find(number: int, _sub: AlignmentContext, files: AlignmentFiles) -> CommonRows | None:
            nonlocal known
            common = files.common()
            if common is None and earlier is not None:
                common = files.common_of(context.folder.parent.parent / earlier / context.name)
                files.finish(common)
            known = number + (common is not None)
            return common

        result = self._run_passes(context, find)
        if result is not None and earlier is not None:
            _require_enough(self._recipe.rows, result.common.rows)
        return known

    def _run_pass(
        self, context: AlignmentContext, files: AlignmentFiles, number: int, known: int
    ) -> CommonRows:
        """Finds the common rows of a pass, unless all parties have saved them.

        ``known``: The number of passes whose common rows this party had at the beginning.
        """
        ring = PsiRing(self._recipe, self._policy, context, number)
        keys, agreement = self._recipe.rows.keys, None
        common = files.common()
        if common is None:
            # The rows of this pass depend on those of earlier passes, which were found again.
            known = min(known, number)
        try:
            engine = self._choose_engine(context.at_least)
            agreement = Meeting(ring, files, engine).meet(known=known)
            if agreement.known > number and agreement.known < len(keys):
                rounds: Rounds = KnownRounds(ring, files, agreement)
            elif agreement.known > number and common is not None:
                return common
            else:
                rounds = (BucketRounds if agreement.rr22 else Rounds)(ring, files, agreement)
            common = rounds.run()
            if not keys:
                self._check_enough(common.rows, context)
            masks = [*common.holders.values()] or [common.rows]
            ids = Ids.of(context.table.ids)
            rounds.compare([ids.take(np.flatnonzero(mask)) for mask in masks], common.salt)
            files.finish(common)
            return common
        except (PeerError, AbortedError):
            # The error ends the run, so the attempt cannot be resumed.
            if agreement is None or agreement.known <= number:
                files.forget()
            raise

    def _check_enough(self, common: npt.NDArray[np.bool_], context: AlignmentContext) -> None:
        """Raises PeerError (ROWS_DIFFER) if there are fewer common rows than the recipe or this
        party requires.
        """
        if self._divides:
            _require_enough(self._recipe.rows, common)
        count = int(common.sum())
        # With rows.partial, a party may hold none of the rows to predict.
        minimum = 0 if self._partial is not None and context.at_least == 1 else context.at_least
        if count < minimum:
            raise PeerError(
                Code.ROWS_DIFFER,
                f"{context.name}: there are fewer common rows than it requires for predictions.",
                party=context.name,
            ).privately(
                f"{context.name}: the number of common rows must be at least {context.at_least:,}, "
                f"the predict.at_least of its party file (got {count:,}). Reduce predict.at_least, "
                "or align more rows."
            )


def _require_enough(rows: RowsSettings, common: npt.NDArray[np.bool_]) -> None:
    """Raises PeerError if too few of this party's rows are common."""
    count = int(common.sum())
    if count < compute_min_common(rows.at_least, len(common)):
        raise make_too_few_error(rows.at_least, count, partial=rows.partial)
