"""The rows of all ranks: each reads the party's table itself, and takes what rank 0 names by
position.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows
from vfl_party.data import Features, Preprocessor, Table
from vfl_party.data.rows import Prepared
from vfl_party.ranks.group import Ranks, Whole, Word, convert_rank_errors, shares
from vfl_party.selfsup.augment import Augment, make_augment
from vfl_party.selfsup.augment.settings import AugmentSettings

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class TablePart:
    """Rows of one of the party's tables.

    ``table``: its number, 0 for the one that is aligned, 1 for the rows that only this party has.
    ``rows``: their positions; None: all, in its order.
    """

    table: int
    rows: Rows | None = None


def begin_ranks(
    ranks: Ranks, alike: dict[str, str], parts: Sequence[TablePart], prepared: Prepared
) -> None:
    """Has the others make the encoder inputs of these rows, and compares: at rank 0.

    The statistics and vocabularies of the columns are rank 0's. ``alike``: {what it is: its value},
    what else all ranks must have. Raises InputError (DATA_INVALID) if a rank cannot read its table,
    or has another one.
    """
    assert prepared.preprocessor is not None  # noqa: S101 - a party that shares an encoder has it
    arrays = [part.rows.astype(np.int64) for part in parts if part.rows is not None]
    facts = {
        "alike": alike,
        "parts": [[part.table, part.rows is None] for part in parts],
        "preprocessor": prepared.preprocessor.state(),
    }
    with convert_rank_errors():
        ranks.tell(Word.BEGIN, facts, arrays)
        with ranks.at_work():
            digest = prepared.inputs_digest
        answers = ranks.answers(_answer(digest))
    mine, host = answers[0]["digest"], answers[0]["host"]
    for rank, answer in enumerate(answers):
        if answer["error"]:
            raise InputError(
                Code.DATA_INVALID,
                f"process {rank} of this party, on {answer['host']}: {answer['error']} Check the "
                "files there.",
            )
        if answer["digest"] != mine:
            raise InputError(
                Code.DATA_INVALID,
                f"process {rank} of this party, on {answer['host']}: {prepared.table.source} has "
                f"other ids or values than for process 0, on {host}. Copy the same file to all "
                "hosts.",
            )


def _answer(digest: str, error: str = "") -> dict[str, Any]:
    return {"host": socket.gethostname(), "digest": digest, "error": error}


def _rows(positions: Whole) -> Rows:
    """Returns positions as such."""
    return positions.astype(np.int64, copy=False)


class RankRows:
    """The rows of a rank other than 0: those of its own copy of the table that rank 0 names.

    ``alike``: see ``begin``. ``tables``: reads the party's tables, when rank 0 begins. It may raise
    InputError, which rank 0 then hears.
    """

    def __init__(
        self, ranks: Ranks, alike: dict[str, str], tables: Callable[[], Sequence[Table]]
    ) -> None:
        self._ranks, self._alike, self._read = ranks, alike, tables
        self._tables: Sequence[Table] | None = None
        self._features: Features | None = None
        self._augments: list[Augment] = []
        # Both views of a batch are wanted, and by several encoders.
        self._drawn: tuple[list[bytes], tuple[Inputs, ...]] = ([], ())

    @property
    def features(self) -> Features:
        """What rank 0 has begun with."""
        assert self._features is not None  # noqa: S101 - rank 0 begins with the rows
        return self._features

    def begin(self, facts: dict[str, Any], arrays: Sequence[Whole]) -> bool:
        """Makes the rows ready and answers; returns whether it could."""
        self._features, self._augments, self._drawn = None, [], ([], ())
        digest = error = ""
        with self._ranks.at_work():
            try:
                prepared = self._prepare(facts, iter(arrays))
                digest = prepared.inputs_digest
                assert prepared.features is not None  # noqa: S101 - made there
                self._features = prepared.features.to(self._ranks.device)
            except InputError as problem:
                error = str(problem)
            except IndexError:
                error = "its table has fewer rows than that of process 0."
        self._ranks.answers(_answer(digest, error))
        return not error

    def _prepare(self, facts: dict[str, Any], arrays: Iterator[Whole]) -> Prepared:
        for what, value in facts["alike"].items():
            if self._alike[what] != value:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"{what}: is not that of process 0. Copy the same files to all hosts.",
                )
        self._tables = self._tables or self._read()
        preprocessor = Preprocessor.from_state(facts["preprocessor"])
        tables: list[Table] = []
        for number, whole in facts["parts"]:
            table = self._tables[number]
            tables.append(table if whole else table.select(_rows(next(arrays))))
        features = preprocessor.transform(tables[0])
        for more in tables[1:]:
            features = features.concat(preprocessor.transform(more), tables[0].space)
        return Prepared(tables[0], preprocessor, features, None, None, {})

    def views(self, facts: dict[str, Any], arrays: Sequence[Whole]) -> None:
        """Makes what draws random views."""
        settings = AugmentSettings.model_validate(facts["settings"])
        self._augments.append(make_augment(settings, self.features, _rows(arrays[0])))

    def batches(
        self, batch_facts: Sequence[dict[str, Any]], arrays: Sequence[Whole]
    ) -> list[Inputs]:
        """Returns the arguments of an encoder for this rank's share of each batch."""
        left = iter(arrays)
        return [self._batch(facts, _rows(next(left)), left) for facts in batch_facts]

    def _batch(self, facts: dict[str, Any], rows: Rows, left: Iterator[Whole]) -> Inputs:
        sizes = shares(len(rows), self._ranks.size)
        start = sum(sizes[: self._ranks.rank])
        mine = slice(start, start + sizes[self._ranks.rank])
        if "views" in facts:
            views = self._views_of(facts, rows, next(left))
            return tuple(x[mine] for x in views[facts["which"]])
        if "column" in facts:
            others = _rows(next(left))
            return self.features.with_column_of(rows[mine], others[mine], facts["column"])
        return self.features.inputs(rows[mine])

    def _views_of(self, facts: dict[str, Any], rows: Rows, drawn: Whole) -> tuple[Inputs, ...]:
        """Draws the views of the whole batch: each row's numbers follow from its place in it."""
        key = [bytes([facts["views"], facts["count"]]), rows.tobytes(), drawn.tobytes()]
        if self._drawn[0] != key:
            random = torch.Generator()
            random.set_state(torch.from_numpy(drawn.copy()))
            augment, inputs = self._augments[facts["views"]], self.features.inputs(rows)
            views: tuple[Inputs, ...] = (
                augment.two_views(inputs, random)
                if facts["count"] == 2
                else (augment.one_view(inputs, random),)
            )
            self._drawn = key, views
        return self._drawn[1]
