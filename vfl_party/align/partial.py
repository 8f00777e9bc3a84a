"""The rows that the active party and at least one other hold (``rows.partial``): their holders and
order.

A private set intersection has told each passive party which of its rows the active party holds, and
the active party the holders of each of its rows. The lists differ from pair to pair, so each
passive party compares its list with the active party. It then learns the position of each of its
rows in an order of all rows, which the active party draws with a secret key, so that positions
reveal nothing of the rows between them. The rows of one split come first, then those of the next
one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from vfl_common.bundle import Kind
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.files import write_atomic
from vfl_party.align.aligned import AlignedRows, AlignmentContext
from vfl_party.align.digest import (
    AGAIN,
    CPU,
    OPENING,
    PASSES,
    ROWS,
    SHOWN,
    describe_rows,
    show_again,
    slow_digest,
)
from vfl_party.align.exchanges import ints
from vfl_party.align.state import CommonRows, shuffle_rows
from vfl_party.base.held import HeldRows, Mask
from vfl_party.base.seeds import Rows
from vfl_party.data import Table
from vfl_party.data.rows import CODES, decode_division, divide_rows, division_of, encode_division
from vfl_party.outbound.chains import make_chains
from vfl_party.outbound.declared import Exchange, Occurrence, Sent, i64
from vfl_party.outbound.exchange import Answering, Asking
from vfl_party.outbound.policies import Policy

PLACED = Exchange(
    "places",
    ROWS.up,
    Sent(Kind.ROWS, {"splits": i64(len(CODES)), "places": i64("rows")}, label_free=True),
    when=ROWS.when,
)
# File in a passive party's folder of a run.
KEPT = "places.json"


class PartialRows:
    """Compares and orders the rows that a private set intersection has found; see ``Alignment``.

    ``divides``: false for rows to predict, which have no splits.
    """

    def __init__(self, recipe: Recipe, policy: Policy, *, divides: bool, remedy: str) -> None:
        self._recipe, self._policy, self._divides, self._remedy = recipe, policy, divides, remedy

    def occurrences(self, rows: int) -> list[Occurrence]:
        """See ``Alignment.occurrences``."""
        return [Occurrence.of(PLACED, SHOWN, rows=rows)]

    def align(self, at: AlignmentContext, common: CommonRows) -> AlignedRows:
        """Compares the common rows pair by pair, and agrees on their order.

        Raises PeerError (ROWS_DIFFER) at the active party, naming a party that holds other ids; at
        a passive party if the active party sends impossible positions, or if this party has no
        training row.
        """
        if at.name == self._recipe.active.name:
            return self._tell(at, common)
        active, rows = self._recipe.active.name, np.flatnonzero(common.rows)
        reply = self._asking(at, len(rows)).swap(
            SHOWN, describe_rows(at, at.table.select(rows).ids)
        )
        splits, places = reply["splits"].numpy(), reply["places"].numpy()
        # As Python integers: a sum of large int64 values overflows.
        counts = splits.tolist()
        fits = min(counts) >= 0 and 0 < sum(counts) <= at.peer_rows_at_most
        known = np.unique(places)
        within = bool(((known >= 0) & (known < sum(counts))).all())
        if not (fits and within and len(known) == len(places)):
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{active}: sent impossible places of rows. Begin a new run.",
                party=active,
            )
        write_atomic(
            at.folder / KEPT, json.dumps({"splits": splits.tolist(), "places": places.tolist()})
        )
        return self._place(at, rows, splits, places)

    def _asking(self, at: AlignmentContext, rows: int) -> Asking:
        chains = make_chains(self._recipe, OPENING, PLACED, "passive", self._policy)
        active = self._recipe.active.name
        return Asking(PLACED, OPENING, chains, at.connections, active, CPU, {"rows": rows})

    def show(self, at: AlignmentContext, aligned: AlignedRows) -> None:
        """See ``Alignment.show``."""
        ids = at.table.select(np.sort(aligned.rows)).ids
        show_again(self._asking(at, len(ids)), at, ids)

    def restore(self, at: AlignmentContext, common: CommonRows) -> AlignedRows:
        """Returns the rows that this party agreed on earlier in the run. Raises InputError."""
        if at.name == self._recipe.active.name:
            return self._order(at.table, common)
        path, rows = at.folder / KEPT, np.flatnonzero(common.rows)
        try:
            saved = json.loads(path.read_text())
            splits, places = (np.array(saved[name], np.int64) for name in ("splits", "places"))
            if len(places) != len(rows):
                raise ValueError
            return self._place(at, rows, splits, places)
        except (OSError, ValueError, TypeError, KeyError, IndexError):
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: does not hold the places of this party's rows. Restore it, or begin a "
                "new run.",
            ) from None

    def _place(
        self, at: AlignmentContext, rows: Rows, splits: npt.NDArray[np.int64], places: Rows
    ) -> AlignedRows:
        order, whole = np.argsort(places), np.repeat(np.arange(len(CODES), dtype=np.uint8), splits)
        held = np.zeros(len(whole), bool)
        held[places] = True
        mine = whole[held]
        if self._divides and not (mine == CODES.index("train")).any():
            raise PeerError(
                Code.ROWS_DIFFER,
                f"{at.name}: has no common row for training. Give it more rows.",
                party=at.name,
            )
        return build_aligned(at.table, rows[order], whole, {at.name: held}, mine, self._divides)

    def _tell(self, at: AlignmentContext, common: CommonRows) -> AlignedRows:
        aligned = self._order(at.table, common)
        chains = make_chains(self._recipe, OPENING, PLACED, "active", self._policy)
        answering = Answering(PLACED, OPENING, chains, at.connections, CPU, {})
        # The order of all rows, and the place of each row of the table in it.
        place_N = np.zeros(len(at.table), np.int64)
        place_N[aligned.rows] = np.arange(len(aligned.ids))
        lists = {name: np.flatnonzero(held) for name, held in common.holders.items()}
        received = answering.collect(SHOWN)
        for party, shown_rows in received.items():
            mine = describe_rows(at, at.table.select(lists[party]).ids)
            if any(not torch.equal(shown_rows[name], mine[name]) for name in mine):
                raise PeerError(
                    Code.ROWS_DIFFER,
                    f"{party}: does not take the same rows as common as {at.name}. {self._remedy}",
                    party=party,
                )
        answering.hub.ask_again(AGAIN)
        codes = np.frombuffer(aligned.division or bytes(len(aligned.ids)), np.uint8)
        sizes = ints(*np.bincount(codes, minlength=len(CODES)).tolist())
        answering.reply(
            SHOWN,
            {
                party: {"splits": sizes, "places": torch.from_numpy(place_N[lists[party]])}
                for party in received
            },
        )
        return aligned

    def _order(self, table: Table, common: CommonRows) -> AlignedRows:
        """Returns the active party's rows in the order of all."""
        return order_rows(self._recipe, table, common.rows, common.holders, divides=self._divides)


def order_rows(
    recipe: Recipe, table: Table, rows_N: Mask, holders: Mapping[str, Mask], *, divides: bool
) -> AlignedRows:
    """Draws the order of the rows at the active party, and divides them. Raises InputError.

    Args:
        rows_N: bool [N], the rows of the table to use.
        holders: {passive party: bool [N], the rows of the table that it holds}.
        divides: whether the rows are divided into splits; rows to predict are not.
    """
    key = slow_digest(f"vfl order of rows {recipe.seed}".encode(), table.ids, PASSES)
    every = shuffle_rows(key, len(table))
    order = every[rows_N[every]].astype(np.int64)
    codes = np.zeros(len(order), np.uint8)
    if divides:
        # The rows are shuffled: a passive party can draw the same division, but not the order.
        division = division_of(recipe, table.select(order))
        if division is None:
            division = encode_division(divide_rows(recipe, len(order)), len(order))
        codes = np.frombuffer(division, np.uint8)
    by_split = np.argsort(codes, kind="stable")
    order, codes = order[by_split], codes[by_split]
    masks = {name: held[order] for name, held in holders.items()}
    return build_aligned(table, order, codes, masks, codes, divides)


def of_tables(recipe: Recipe, tables: Mapping[str, Table]) -> dict[str, AlignedRows]:
    """Returns what an alignment gives each party, if all tables are in this process. Raises
    InputError.
    """
    active = recipe.active.name
    table = tables[active]
    holders = {party.name: table.among(tables[party.name].ids) for party in recipe.passives}
    anyone = np.logical_or.reduce([*holders.values()])
    first = order_rows(recipe, table, anyone, holders, divides=True)
    assert first.held is not None  # noqa: S101 - as ordered makes it
    aligned = {active: first}
    codes = np.frombuffer(first.division or b"", np.uint8)
    for name, held in first.held.by.items():
        place = {id_: at for at, id_ in enumerate(tables[name].ids)}
        mine = np.flatnonzero(held)
        rows = np.array([place[first.ids[row]] for row in mine.tolist()], np.int64)
        aligned[name] = AlignedRows(
            tables[name].select(rows).ids, codes[mine].tobytes(), held=first.held, rows=rows
        )
    return aligned


def build_aligned(
    table: Table,
    rows: Rows,
    whole: npt.NDArray[np.uint8],
    by: Mapping[str, Mask],
    mine: npt.NDArray[np.uint8],
    divides: bool,
) -> AlignedRows:
    """Returns what an alignment gives a party.

    Args:
        table: of the party.
        rows: int64 [R], its rows of the table, in the common order.
        whole: uint8 [N], the splits of all rows, positions in ``CODES``.
        by: {party: bool [N], the rows that it holds}.
        mine: uint8 [R], the splits of ``rows``.
        divides: whether the rows have splits.
    """
    splits = decode_division(whole.tobytes()) if divides else {}
    splits["all"] = np.arange(len(whole), dtype=np.int64)
    division = mine.tobytes() if divides else None
    return AlignedRows(table.select(rows).ids, division, held=HeldRows(splits, by), rows=rows)
