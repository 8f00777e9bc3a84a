"""Private set intersection: the parties find the rows that all of them hold, and show each other no
other row.

Diffie-Hellman on Curve25519 among any number of parties and the aggregation server; all follow the
protocol, and the server takes no party's side. With the keys a, b, c of the parties A (active), B
and C:

    round 1    A -> B: A's rows, masked by a      B -> C: masked by b         C -> A: masked by c
    round 2    C's rows, masked by c and a        A's rows, by a and b        B's rows, by b and c
    round 3    the last one to mask a set sends tags of it to the server: A of B's rows, B of
               C's, C of A's

Each owner shuffles its rows once, and nobody changes that order. The server compares the tags, and
tells each owner which of its own rows are common. No party ever sees two sets under the same keys,
so none can compare any; the server sees all sets, masked by all keys, so it learns how large they
and their overlaps are, and no id. What B sends C passes A, who answers both: it is sealed for C
(``vfl_party.psi.sealed``). ``docs/explanation/private-alignment.md`` says who learns what.

With ``rows.partial`` the server tells a passive party which of its rows the active party holds, and
the active party which of its rows each passive party holds; ``vfl_party.align.partial`` goes on.

The rows go in batches, a step each. Every party keeps what it has masked on its disk, and the
server the tags, so that neither needs memory for them, and a process that is killed costs the
others the batches that were under way.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vfl_common.config.recipe import Recipe
from vfl_common.config.recipe_tables import RowsSettings
from vfl_common.errors import AbortedError, Code, InputError, PeerError
from vfl_common.psi import min_common, too_few
from vfl_party.align import batches
from vfl_party.align.aligned import AlignedRows, AlignmentContext
from vfl_party.align.digest import DigestAlignment
from vfl_party.align.exchanges import occurrences
from vfl_party.align.meeting import Meeting
from vfl_party.align.partial import PartialRows
from vfl_party.align.ring import PsiRing
from vfl_party.align.rounds import Rounds
from vfl_party.align.state import AlignmentFiles, CommonRows
from vfl_party.data import Table
from vfl_party.data.ids import Ids
from vfl_party.outbound.declared import Occurrence
from vfl_party.outbound.policies import Policy

REMEDY = "To align again, remove the folder 'alignment' of the run at either party."


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
        """See ``Alignment.occurrences``."""
        exchanged = occurrences(1 + len(self._recipe.passives), rows)
        return [*exchanged, *(self._partial or self._digest).occurrences(rows)]

    def get_expected(self, table: Table) -> AlignedRows:
        """See ``Alignment.get_expected``."""
        return self._digest.get_expected(table)

    def get_agreed(self, at: AlignmentContext) -> AlignedRows:
        """See ``Alignment.get_agreed``."""
        common = self._load_common(at)
        if common is None and self._recipe.passives:
            raise InputError(
                Code.DATA_INVALID,
                f"{at.folder}: does not say which rows all parties hold, and the other parties "
                "are in the middle of the run. Restore the folder and the rows that it had.",
            )
        if common is not None and self._partial is not None:
            return self._partial.restore(at, self._select_wanted(common))
        if common is None:
            return self._digest.get_expected(at.table).with_kept(at.folder)
        rows = np.flatnonzero(common.rows)
        aligned = self._digest.get_expected(at.table.select(rows)).with_kept(at.folder)
        return replace(aligned, rows=rows)

    def show(self, at: AlignmentContext, aligned: AlignedRows) -> None:
        """See ``Alignment.show``."""
        common = self._load_common(at)
        rows = self._partial if self._partial is not None and common is not None else self._digest
        rows.show(at if common is None else replace(at, salt=common.salt), aligned)

    def _load_common(self, at: AlignmentContext) -> CommonRows | None:
        """Returns the common rows, if this party has saved them."""
        if not self._recipe.passives:
            return None
        return self._open_files(at.folder, at.table, at.name).common()

    def _open_files(self, folder: Path, table: Table, name: str) -> AlignmentFiles:
        """Returns a party's files of an alignment. ``folder``: its folder of the run."""
        tells_apart = self._partial is not None and name == self._recipe.active.name
        holders = [party.name for party in self._recipe.passives] if tells_apart else []
        return AlignmentFiles(folder, table.ids, batches.BATCH, holders)

    def _select_wanted(self, common: CommonRows) -> CommonRows:
        """Returns the rows to use: for predictions, all rows of an active party with features."""
        if self._divides or not (common.holders and self._recipe.active.features):
            return common
        return replace(common, rows=np.ones_like(common.rows))

    def count_earlier(self, runs: Path, name: str, table: Table) -> int | None:
        """Returns how many common rows the run of ``rows.alignment`` found; None if the recipe
        names none.

        ``runs``: the party's folder of runs. Raises InputError if that run cannot be used;
        PeerError if it has too few rows.
        """
        common = self._of_earlier(self._open_files(runs, table, name), runs, name)
        return int(common.rows.sum()) if common is not None else None

    def _of_earlier(self, files: AlignmentFiles, runs: Path, name: str) -> CommonRows | None:
        rows = self._recipe.rows
        if rows.alignment is None or not self._divides:
            return None
        common = files.common_of(runs / rows.alignment / name)
        _require_enough(rows, common.rows)
        return common

    def align(self, at: AlignmentContext) -> AlignedRows:
        """Finds the common rows, unless the run already knows them, and compares them as
        ``DigestAlignment`` does.

        Raises PeerError: ROWS_DIFFER if there are fewer than ``rows.at_least`` or ``at.at_least``;
        REFUSED if a party has more than ``at.peer_rows_at_most``; another code if a party or the
        server breaks the protocol. Raises InputError if the file of an earlier alignment does not
        fit.
        """
        if not self._recipe.passives:
            return self._digest.align(at)
        files = self._open_files(at.folder, at.table, at.name)
        common = files.common()
        if (
            common is None
            and (common := self._of_earlier(files, at.folder.parent.parent, at.name)) is not None
        ):
            files.finish(common)
        ring = PsiRing(self._recipe, self._policy, at)
        agreed = None
        try:
            agreed = Meeting(ring, files).meet(known=common is not None)
            if not agreed.known:
                rounds = Rounds(ring, files, agreed)
                common = rounds.run()
                self._check_enough(common.rows, at)
                masks = [*common.holders.values()] or [common.rows]
                ids = Ids.of(at.table.ids)
                rounds.compare([ids.take(np.flatnonzero(mask)) for mask in masks], common.salt)
                files.finish(common)
        except (PeerError, AbortedError):
            # The run ends, and the attempt with it.
            if agreed is None or not agreed.known:
                files.forget()
            raise
        if common is None:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{ring.active}: says that all parties know the common rows, but {at.name} does "
                "not. Begin a new run.",
                party=ring.active,
            )
        salted = replace(at, salt=common.salt)
        if self._partial is not None:
            aligned = self._partial.align(salted, self._select_wanted(common))
        else:
            rows = np.flatnonzero(common.rows)
            compared = self._digest.align(replace(salted, table=at.table.select(rows)))
            aligned = replace(compared, rows=rows)
        # All parties have kept the common rows before they compared them.
        files.clear()
        return aligned

    def _check_enough(self, common: npt.NDArray[np.bool_], at: AlignmentContext) -> None:
        """Raises PeerError (ROWS_DIFFER) if there are fewer common rows than the recipe or this
        party requires.
        """
        if self._divides:
            _require_enough(self._recipe.rows, common)
        count = int(common.sum())
        # A party may know none of the rows to predict.
        minimum = 0 if self._partial is not None and at.at_least == 1 else at.at_least
        if count < minimum:
            raise PeerError(
                Code.ROWS_DIFFER,
                f"{at.name}: all parties hold fewer rows than it answers for.",
                party=at.name,
            ).privately(
                f"{at.name}: all parties must hold at least {at.at_least:,} rows, the "
                f"predict.at_least of its party file (got {count:,}). Reduce it, or align more "
                "rows."
            )


def _require_enough(rows: RowsSettings, common: npt.NDArray[np.bool_]) -> None:
    """Raises PeerError if too few of this party's rows are common."""
    count = int(common.sum())
    if count < min_common(rows.at_least, len(common)):
        raise too_few(rows.at_least, count, partial=rows.partial)
