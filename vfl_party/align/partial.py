"""Aligns the rows that the active party and at least one passive party hold (``rows.partial``).

After the private set intersection, each passive party knows which of its rows the active party
holds, and the active party knows the holders of each of its rows. Each pair of parties has another
list of common rows, so each passive party compares its list with the active party. The active party
then draws an order of all rows with a secret key, sorted by split. Each passive party receives the
positions of its rows in this order. The positions reveal nothing about the rows between them.
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
    compare_again,
    compute_slow_digest,
    describe_rows,
)
from vfl_party.align.exchanges import to_tensor
from vfl_party.align.state import CommonRows, shuffle_rows
from vfl_party.base.seeds import HeldRows, Mask, Rows
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
# File with the positions of a passive party's rows, in its folder of a run.
KEPT = "places.json"


class PartialRows:
    """Compares and orders the rows that a private set intersection has found; see ``Alignment``.

    ``divides``: Whether to divide the rows into splits; false for rows to predict.
    """

    def __init__(self, recipe: Recipe, policy: Policy, *, divides: bool, remedy: str) -> None:
        self._recipe, self._policy, self._divides, self._remedy = recipe, policy, divides, remedy

    def occurrences(self, rows: int) -> list[Occurrence]:
        """See ``Alignment.occurrences``."""
        return [Occurrence.of(PLACED, SHOWN, rows=rows)]

    def align(self, context: AlignmentContext, common: CommonRows) -> AlignedRows:
        """Compares the common rows of each pair of parties, and agrees on their order.

        Raises PeerError: ROWS_DIFFER at the active party, which names a party with different ids;
        MALFORMED_MESSAGE at a passive party if the active party sends impossible positions;
        ROWS_DIFFER if this party has no training row.
        """
        if context.name == self._recipe.active.name:
            return self._align_active(context, common)
        active, rows = self._recipe.active.name, np.flatnonzero(common.rows)
        reply = self._make_asking(context, len(rows)).swap(
            SHOWN, describe_rows(context, context.table.select(rows).ids)
        )
        splits, places = reply["splits"].numpy(), reply["places"].numpy()
        # Python integers, because a sum of large int64 values may overflow.
        counts = splits.tolist()
        counts_fit = min(counts) >= 0 and 0 < sum(counts) <= context.peer_rows_at_most
        distinct_places = np.unique(places)
        places_fit = bool(((distinct_places >= 0) & (distinct_places < sum(counts))).all())
        if not (counts_fit and places_fit and len(distinct_places) == len(places)):
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{active}: sent impossible positions of rows. Begin a new run.",
                party=active,
            )
        write_atomic(
            context.folder / KEPT,
            json.dumps({"splits": splits.tolist(), "places": places.tolist()}),
        )
        return self._build_placed(context, rows, splits, places)

    def _make_asking(self, context: AlignmentContext, rows: int) -> Asking:
        chains = make_chains(self._recipe, OPENING, PLACED, "passive", self._policy)
        active = self._recipe.active.name
        return Asking(PLACED, OPENING, chains, context.connections, active, CPU, {"rows": rows})

    def show(self, context: AlignmentContext, aligned: AlignedRows) -> None:
        """See ``Alignment.show``."""
        ids = context.table.select(np.sort(aligned.rows)).ids
        compare_again(self._make_asking(context, len(ids)), context, ids)

    def restore(self, context: AlignmentContext, common: CommonRows) -> AlignedRows:
        """Returns the rows that this party agreed on earlier in the run. Raises InputError."""
        if context.name == self._recipe.active.name:
            return self._order_rows(context.table, common)
        path, rows = context.folder / KEPT, np.flatnonzero(common.rows)
        try:
            saved = json.loads(path.read_text())
            splits, places = (np.array(saved[name], np.int64) for name in ("splits", "places"))
            if len(places) != len(rows):
                raise ValueError
            return self._build_placed(context, rows, splits, places)
        except (OSError, ValueError, TypeError, KeyError, IndexError):
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: does not contain the positions of this party's rows. Restore it, or "
                "begin a new run.",
            ) from None

    def _build_placed(
        self, context: AlignmentContext, rows: Rows, splits: npt.NDArray[np.int64], places: Rows
    ) -> AlignedRows:
        order, all_splits = (
            np.argsort(places),
            np.repeat(np.arange(len(CODES), dtype=np.uint8), splits),
        )
        is_own_N = np.zeros(len(all_splits), bool)
        is_own_N[places] = True
        own_splits = all_splits[is_own_N]
        if self._divides and not (own_splits == CODES.index("train")).any():
            raise PeerError(
                Code.ROWS_DIFFER,
                f"{context.name}: has no common row for training. Give it more rows.",
                party=context.name,
            )
        return build_aligned(
            context.table,
            rows[order],
            all_splits,
            {context.name: is_own_N},
            own_splits,
            self._divides,
        )

    def _align_active(self, context: AlignmentContext, common: CommonRows) -> AlignedRows:
        aligned = self._order_rows(context.table, common)
        chains = make_chains(self._recipe, OPENING, PLACED, "active", self._policy)
        answering = Answering(PLACED, OPENING, chains, context.connections, CPU, {})
        # The position of each row of the table in the order of all rows.
        place_N = np.zeros(len(context.table), np.int64)
        place_N[aligned.rows] = np.arange(len(aligned.ids))
        lists = {name: np.flatnonzero(held) for name, held in common.holders.items()}
        received = answering.collect(SHOWN)
        for party, description in received.items():
            expected = describe_rows(context, context.table.select(lists[party]).ids)
            if any(not torch.equal(description[name], expected[name]) for name in expected):
                raise PeerError(
                    Code.ROWS_DIFFER,
                    f"{party}: does not have the same common rows as {context.name}. "
                    f"{self._remedy}",
                    party=party,
                )
        answering.hub.ask_again(AGAIN)
        codes = np.frombuffer(aligned.division or bytes(len(aligned.ids)), np.uint8)
        sizes = to_tensor(*np.bincount(codes, minlength=len(CODES)).tolist())
        answering.reply(
            SHOWN,
            {
                party: {"splits": sizes, "places": torch.from_numpy(place_N[lists[party]])}
                for party in received
            },
        )
        return aligned

    def _order_rows(self, table: Table, common: CommonRows) -> AlignedRows:
        """Returns the active party's rows in the common order."""
        return order_rows(self._recipe, table, common.rows, common.holders, divides=self._divides)


def order_rows(
    recipe: Recipe, table: Table, rows_N: Mask, holders: Mapping[str, Mask], *, divides: bool
) -> AlignedRows:
    """Draws the order of the rows at the active party, and divides them. Raises InputError.

    Args:
        rows_N: bool [N], whether each row of the table is used.
        holders: For each passive party, bool [N], whether it holds each row of the table.
        divides: Whether to divide the rows into splits; false for rows to predict.
    """
    key = compute_slow_digest(f"vfl order of rows {recipe.seed}".encode(), table.ids, PASSES)
    shuffled_rows = shuffle_rows(key, len(table))
    order = shuffled_rows[rows_N[shuffled_rows]].astype(np.int64)
    codes = np.zeros(len(order), np.uint8)
    if divides:
        # The rows are shuffled first: a passive party can compute the division, but not the order.
        division = division_of(recipe, table.select(order))
        if division is None:
            division = encode_division(divide_rows(recipe, len(order)), len(order))
        codes = np.frombuffer(division, np.uint8)
    by_split = np.argsort(codes, kind="stable")
    order, codes = order[by_split], codes[by_split]
    masks = {name: held[order] for name, held in holders.items()}
    return build_aligned(table, order, codes, masks, codes, divides)


def align_tables(recipe: Recipe, tables: Mapping[str, Table]) -> dict[str, AlignedRows]:
    """Returns the aligned rows of each party, if this process has all tables. Raises InputError."""
    active = recipe.active.name
    table = tables[active]
    holders = {party.name: table.among(tables[party.name].ids) for party in recipe.passives}
    is_shared_N = np.logical_or.reduce([*holders.values()])
    active_rows = order_rows(recipe, table, is_shared_N, holders, divides=True)
    assert active_rows.held is not None  # noqa: S101 - order_rows sets it
    aligned = {active: active_rows}
    codes = np.frombuffer(active_rows.division or b"", np.uint8)
    for name, held in active_rows.held.by.items():
        positions = {id_: position for position, id_ in enumerate(tables[name].ids)}
        held_rows = np.flatnonzero(held)
        rows = np.array([positions[active_rows.ids[row]] for row in held_rows.tolist()], np.int64)
        aligned[name] = AlignedRows(
            tables[name].select(rows).ids,
            codes[held_rows].tobytes(),
            held=active_rows.held,
            rows=rows,
        )
    return aligned


def build_aligned(
    table: Table,
    rows: Rows,
    all_splits: npt.NDArray[np.uint8],
    holders: Mapping[str, Mask],
    own_splits: npt.NDArray[np.uint8],
    divides: bool,
) -> AlignedRows:
    """Returns the aligned rows of a party in the common order.

    Args:
        table: The table of the party.
        rows: int64 [R], the positions of its rows in the table, in the common order.
        all_splits: uint8 [N], the split of each row of all parties, as a position in ``CODES``.
        holders: For each party, bool [N], whether it holds each row.
        own_splits: uint8 [R], the split of each of ``rows``.
        divides: Whether the rows have splits.
    """
    splits = decode_division(all_splits.tobytes()) if divides else {}
    splits["all"] = np.arange(len(all_splits), dtype=np.int64)
    division = own_splits.tobytes() if divides else None
    return AlignedRows(table.select(rows).ids, division, held=HeldRows(splits, holders), rows=rows)
