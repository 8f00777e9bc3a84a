"""Runs the ranks other than 0, which compute what rank 0 requests. They have rows and weights, but
no state for checkpoints.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vfl_common.errors import Code, InputError, InternalError
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.data import Features, Preprocessor, Table
from vfl_party.data.rows import Prepared
from vfl_party.models import InputSpec, TwoTowers
from vfl_party.models.training import Precision, backward
from vfl_party.ranks.group import IntegerArray, Ranks, Word, convert_rank_errors, divide_rows
from vfl_party.ranks.spread import OnRanks, describe_structure
from vfl_party.selfsup.augment import Augment, make_augment
from vfl_party.selfsup.settings import AugmentSettings

# Makes an encoder for an input spec. True for the encoder that all phases share, False for an
# additional encoder of a phase.
Make = Callable[[InputSpec, bool], nn.Module]


def follow(ranks: Ranks, rows: RankRows, make: Make, precision: Precision) -> None:
    """Computes until rank 0 sends END. Raises RankLost if rank 0 ended without END.

    make: Makes encoders on the CPU. Their initial weights do not matter, because each batch comes
    with rank 0's weights.
    """
    share: _Share | None = None
    while True:
        with convert_rank_errors():
            word, facts, arrays = ranks.receive_command()
            match word:
                case Word.END:
                    return
                case Word.BEGIN:
                    share = None
                    if rows.begin(facts, arrays):
                        share = _Share(ranks, rows, make, precision)
                case Word.VIEWS:
                    rows.views(facts, arrays)
                case _ if share is None:
                    raise InternalError(f"rank 0 sent {word.name} before it sent rows")
                case Word.ENCODER:
                    share.add(facts["structure"], trains=facts["trains"])
                case Word.FORWARD:
                    share.forward(facts, rows.batches(facts["batches"], arrays))
                case Word.BACKWARD:
                    share.backward(facts["encoder"])


class _Share:
    """Computes this rank's rows of each batch."""

    def __init__(self, ranks: Ranks, rows: RankRows, make: Make, precision: Precision) -> None:
        self._ranks, self._make, self._precision = ranks, make, precision
        self._spec = rows.features.spec
        self._encoders: list[OnRanks] = []
        # {number of the encoder: its last embeddings, which wait for a gradient}.
        self._z: dict[int, Tensor] = {}

    def add(self, wanted: str, *, trains: bool) -> None:
        """Adds the encoder whose structure is ``wanted``: the shared encoder, one of its two
        towers, or an additional encoder.
        """
        encoder = next(
            (
                candidate
                for candidate in self._make_candidates()
                if describe_structure(candidate) == wanted
            ),
            None,
        )
        if encoder is None:
            raise InternalError("a phase has an encoder of another kind than the party's encoder")
        if not trains:
            # An encoder without training, such as a moving average, gets no gradients.
            encoder.requires_grad_(requires_grad=False)
        ranks, encoder = self._ranks, encoder.to(self._ranks.device)
        self._encoders.append(OnRanks(ranks, encoder, self._spec, self._precision, trains=trains))

    def _make_candidates(self) -> Iterator[nn.Module]:
        shared = self._make(self._spec, True)
        yield shared
        if isinstance(shared, TwoTowers):
            yield from (shared.cross, shared.local)
        yield self._make(self._spec, False)

    def forward(self, facts: dict[str, Any], batches: list[tuple[Tensor, ...]]) -> None:
        """Embeds this rank's rows of batches with rank 0's weights, and sends the embeddings to
        rank 0.
        """
        ranks, number = self._ranks, facts["encoder"]
        shared = self._encoders[number]
        shared.encoder.train(facts["training"])
        if facts["training"]:
            # Each rank has its own seed, so that dropout masks differ.
            torch.manual_seed(derive_seed(facts["seed"], "rank", ranks.rank))
        ranks.spread(shared.encoder)
        with torch.set_grad_enabled(facts["learns"]):
            z_BD = shared(batches)
        if facts["learns"]:
            self._z[number] = z_BD
        ranks.send([z_BD], [0])

    def backward(self, number: int) -> None:
        """Receives the gradient of the last embeddings and runs the backward pass, which sums the
        gradients of the weights at rank 0.
        """
        z_BD = self._z.pop(number)
        dz_BD = torch.empty_like(z_BD)
        self._ranks.receive([dz_BD], [0])
        for parameter in self._encoders[number].encoder.parameters():
            parameter.grad = None
        backward(z_BD, dz_BD)


Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class TablePart:
    """Rows of one of the party's tables.

    ``table``: The number of the table: 0 for the table that is aligned, 1 for the table of rows
    that only this party has. ``rows``: The positions of the rows; None for all rows in the table's
    order.
    """

    table: int
    rows: Rows | None = None


def begin_ranks(
    ranks: Ranks, alike: dict[str, str], parts: Sequence[TablePart], prepared: Prepared
) -> None:
    """Makes the other ranks prepare the encoder inputs of these rows, and compares the digests of
    the inputs. Called at rank 0.

    The other ranks use rank 0's statistics and vocabularies of the columns. ``alike``: {name:
    value} of further settings that must be the same at all ranks. Raises InputError (DATA_INVALID)
    if a rank cannot read its table, or if its table is different.
    """
    assert prepared.preprocessor is not None  # noqa: S101 - a party that shares an encoder has it
    arrays = [part.rows.astype(np.int64) for part in parts if part.rows is not None]
    facts = {
        "alike": alike,
        "parts": [[part.table, part.rows is None] for part in parts],
        "preprocessor": prepared.preprocessor.state(),
    }
    with convert_rank_errors():
        ranks.send_command(Word.BEGIN, facts, arrays)
        with ranks.at_work():
            digest = prepared.inputs_digest
        exchange_facts = ranks.exchange_facts(_make_answer(digest))
    digest_0, host_0 = exchange_facts[0]["digest"], exchange_facts[0]["host"]
    for rank, answer in enumerate(exchange_facts):
        if answer["error"]:
            raise InputError(
                Code.DATA_INVALID,
                f"process {rank} of this party, on {answer['host']}: {answer['error']} Check the "
                "files there.",
            )
        if answer["digest"] != digest_0:
            raise InputError(
                Code.DATA_INVALID,
                f"process {rank} of this party, on {answer['host']}: {prepared.table.source} has "
                f"other ids or values than for process 0, on {host_0}. Copy the same file to all "
                "hosts.",
            )


def _make_answer(digest: str, error: str = "") -> dict[str, Any]:
    return {"host": socket.gethostname(), "digest": digest, "error": error}


def _to_rows(positions: IntegerArray) -> Rows:
    """Converts an array of positions to int64."""
    return positions.astype(np.int64, copy=False)


class RankRows:
    """The rows of a rank other than 0: the rows of its own copy of the table that rank 0 selects.

    ``alike``: See ``begin_ranks``. ``tables``: Reads the party's tables when rank 0 begins. It may
    raise InputError, which is then reported to rank 0.
    """

    def __init__(
        self, ranks: Ranks, alike: dict[str, str], tables: Callable[[], Sequence[Table]]
    ) -> None:
        self._ranks, self._alike, self._read = ranks, alike, tables
        self._tables: Sequence[Table] | None = None
        self._features: Features | None = None
        self._augments: list[Augment] = []
        # The last drawn views are cached, because several encoders use both views of a batch.
        self._drawn: tuple[list[bytes], tuple[Inputs, ...]] = ([], ())

    @property
    def features(self) -> Features:
        """The features of the rows with which rank 0 has begun."""
        assert self._features is not None  # noqa: S101 - rank 0 begins with the rows
        return self._features

    def begin(self, facts: dict[str, Any], arrays: Sequence[IntegerArray]) -> bool:
        """Prepares the rows and answers rank 0. Returns whether the rows could be prepared."""
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
                error = "its table has fewer rows than the table of process 0."
        self._ranks.exchange_facts(_make_answer(digest, error))
        return not error

    def _prepare(self, facts: dict[str, Any], arrays: Iterator[IntegerArray]) -> Prepared:
        for name, value in facts["alike"].items():
            if self._alike[name] != value:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"{name}: differs from process 0. Copy the same files to all hosts.",
                )
        self._tables = self._tables or self._read()
        preprocessor = Preprocessor.from_state(facts["preprocessor"])
        tables: list[Table] = []
        for number, is_whole in facts["parts"]:
            table = self._tables[number]
            tables.append(table if is_whole else table.select(_to_rows(next(arrays))))
        features = preprocessor.transform(tables[0])
        for table in tables[1:]:
            features = features.concat(preprocessor.transform(table), tables[0].space)
        return Prepared(tables[0], preprocessor, features, None, None, {})

    def views(self, facts: dict[str, Any], arrays: Sequence[IntegerArray]) -> None:
        """Makes an augmentation that draws random views."""
        settings = AugmentSettings.model_validate(facts["settings"])
        self._augments.append(make_augment(settings, self.features, _to_rows(arrays[0])))

    def batches(
        self, batch_facts: Sequence[dict[str, Any]], arrays: Sequence[IntegerArray]
    ) -> list[Inputs]:
        """Returns the arguments of an encoder for this rank's share of each batch."""
        remaining = iter(arrays)
        return [self._batch(facts, _to_rows(next(remaining)), remaining) for facts in batch_facts]

    def _batch(
        self, facts: dict[str, Any], rows: Rows, remaining: Iterator[IntegerArray]
    ) -> Inputs:
        sizes = divide_rows(len(rows), self._ranks.size)
        start = sum(sizes[: self._ranks.rank])
        own_slice = slice(start, start + sizes[self._ranks.rank])
        if "views" in facts:
            views = self._draw_views(facts, rows, next(remaining))
            return tuple(x[own_slice] for x in views[facts["which"]])
        if "column" in facts:
            others = _to_rows(next(remaining))
            return self.features.with_column_of(rows[own_slice], others[own_slice], facts["column"])
        return self.features.inputs(rows[own_slice])

    def _draw_views(
        self, facts: dict[str, Any], rows: Rows, drawn: IntegerArray
    ) -> tuple[Inputs, ...]:
        """Draws the views of the whole batch, because a row's random numbers depend on its position
        in the batch.
        """
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
