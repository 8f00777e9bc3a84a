"""Permutation importance of each party's columns (Breiman 2001), computed jointly.

A party replaces the values of a column in the validation rows by values of other rows, and sends
the embeddings. The active party answers only this party, once, with the loss of quality. Names and
values stay at the party that owns the columns. The active party learns the number of columns.

A metric depends on the labels, and a malicious party can send arbitrary embeddings, so answers of
full precision could disclose all labels (Aggarwal et al. 2021). Each answer therefore has only two
numbers of three digits for each column.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vfl_common.bundle import Kind, StepKey
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.files import private_file
from vfl_common.text import to_json
from vfl_party.base.seeds import derive_seed, draw_permutation
from vfl_party.methods.evaluate.settings import EvaluateSettings, select_metric
from vfl_party.outbound.declared import NOTHING, Exchange, Occurrence, Sent, i64
from vfl_party.outbound.exchange import Answering, Asking
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import Chunk, split_into_chunks

log = logging.getLogger(__name__)

FILE = "importance.json"
# The maximum number of columns in the log.
_LOGGED = 10
# The maximum number of columns of one party; more are probably a mistake.
_MAX_COLUMNS = 10_000
# The number of significant digits in an answer.
_DIGITS = 3
# The name for the only "column" of image data.
_IMAGE = "image"
COUNT = Exchange("columns", Sent(Kind.ROWS, {"columns": i64(1)}), when="once")
CHANGES = Exchange(
    "importance",
    NOTHING,
    Sent(
        Kind.VERDICT,
        {"changes": i64("columns", 2)},
        how="to each party its own; numbers of three digits, as the bits of float64",
    ),
    when="once",
)


def get_column_names(party: Party) -> list[str]:
    """Returns the names of a party's columns; one name for images."""
    return list(party.rows.need_features().columns) or [_IMAGE]


@torch.no_grad()
def permute_columns(
    party: Party, phase: str, settings: EvaluateSettings
) -> Iterator[tuple[str, Iterator[Tensor]]]:
    """Yields, for each column and repeat, the column's name and this party's embeddings of the
    validation rows with the column permuted, one chunk at a time.
    """
    features, rows = party.rows.need_features(), party.rows.get("validation")
    party.models["encoder"].eval()
    for place, name in enumerate(get_column_names(party)):
        column = name if features.columns else None
        for repeat in range(settings.repeats):
            # The party's secret seed hides from other parties which row got which value.
            seed = derive_seed(party.own_seed, "importance", phase, place, repeat)
            permuted_rows = rows[draw_permutation(seed, len(rows))]
            chunk_pairs = zip(
                split_into_chunks(rows), split_into_chunks(permuted_rows), strict=True
            )
            yield (
                name,
                (
                    party.encode(*features.with_column_of(original, permuted, column))
                    for original, permuted in chunk_pairs
                ),
            )


class PassiveImportance:
    """A passive party's side of permutation importance. ``asking``: this party's side of the
    exchange of embeddings.
    """

    def __init__(
        self, party: Party, phase: str, settings: EvaluateSettings, asking: Asking
    ) -> None:
        self._party, self._phase, self._settings = party, phase, settings
        self._embeddings = asking
        self._count = party.exchanges.open_asking(phase, COUNT)
        self._changes = party.exchanges.open_asking(phase, CHANGES)

    def run(self, first: StepKey) -> dict[str, Any]:
        """Runs the exchanges, starting at the step ``first``. Returns the importance of this
        party's columns for ``ImportanceWriter``. Raises as ``Asking.swap``.
        """
        names, batch = get_column_names(self._party), first.batch
        self._count.swap(first, {"columns": torch.tensor([len(names)])})
        for _, embeddings in permute_columns(self._party, self._phase, self._settings):
            for z_BD in embeddings:
                batch += 1
                step = first._replace(batch=batch)
                self._embeddings.swap(step, {"z": z_BD}, self._party.rows.get("validation"))
        answer = self._changes.take(first._replace(batch=batch + 1), columns=len(names))
        return rank_columns(names, answer["changes"].cpu().view(torch.float64))


class ActiveImportance:
    """The active party's side of permutation importance.

    Args:
        answering: The active party's side of the exchange of embeddings.

    Raises InputError if there are no validation rows.
    """

    def __init__(
        self, party: Party, phase: str, settings: EvaluateSettings, answering: Answering
    ) -> None:
        self._party, self._phase, self._settings = party, phase, settings
        self._embeddings = answering
        self._count = party.exchanges.open_answering(phase, COUNT)
        self._changes = party.exchanges.open_answering(phase, CHANGES)
        if not len(party.rows.get("validation")):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: importance needs validation rows (got none). Set "
                "rows.validation.",
            )

    def run(
        self, first: StepKey, chunks: list[Chunk], change: Callable[[list[Chunk]], float]
    ) -> dict[str, Any] | None:
        """Runs the exchanges, starting at the step ``first``. Returns the importance of the active
        party's columns for ``ImportanceWriter``; None without columns.

        Args:
            first: The first step.
            chunks: The embeddings of all parties for the validation rows.
            change: A function that returns the loss of quality when the given embeddings replace
                ``chunks``.

        Raises as ``Answering.collect``.
        """
        party, repeats = self._party, self._settings.repeats
        passives = [passive.name for passive in party.recipe.passives]
        if passives:
            columns = self._collect_counts(first)
            self._answer(first, columns, chunks, change)
        if party.rows.features is None:
            return None
        losses = [
            change(
                [
                    Chunk([z], chunk.others, chunk.rows)
                    for z, chunk in zip(permuted, chunks, strict=True)
                ]
            )
            for _, permuted in permute_columns(party, self._phase, self._settings)
        ]
        return rank_columns(get_column_names(party), _compute_figures(losses, repeats))

    def _collect_counts(self, step: StepKey) -> dict[str, int]:
        """Collects and returns {passive party: its number of columns}."""
        received = self._count.collect(step)
        self._count.acknowledge(step, received)
        columns = {name: int(tensors["columns"]) for name, tensors in received.items()}
        for name, count in columns.items():
            if not 1 <= count <= _MAX_COLUMNS:
                raise PeerError(
                    Code.MALFORMED_MESSAGE,
                    f"{name}: must have from 1 to {_MAX_COLUMNS:,} columns (got {count}).",
                    party=name,
                )
        return columns

    def _answer(
        self,
        first: StepKey,
        columns: dict[str, int],
        chunks: list[Chunk],
        change: Callable[[list[Chunk]], float],
    ) -> None:
        """Collects embeddings with permuted columns from each party until all its columns are
        measured, and then answers that party.
        """
        repeats, num_chunks = self._settings.repeats, len(chunks)
        num_messages = {name: count * repeats * num_chunks for name, count in columns.items()}
        permuted: dict[str, list[Chunk]] = {name: [] for name in num_messages}
        losses: dict[str, list[float]] = {name: [] for name in num_messages}
        for done in range(max(num_messages.values()) + 1):
            step, chunk = first._replace(batch=first.batch + 1 + done), chunks[done % num_chunks]
            senders = {
                name: {"rows": chunk.rows} for name, total in num_messages.items() if done < total
            }
            received = self._embeddings.collect(step, each=senders) if senders else {}
            if senders:
                self._embeddings.acknowledge(step, received)
            for name, tensors in received.items():
                others = {**chunk.others, name: tensors["z"]}
                permuted[name].append(Chunk(chunk.own, others, chunk.rows))
                if len(permuted[name]) == num_chunks:
                    losses[name].append(change(permuted[name]))
                    permuted[name] = []
            ready = [name for name, total in num_messages.items() if done == total]
            if ready:
                self._changes.collect(step, each={name: {} for name in ready})
                figures_by_party = {name: _compute_figures(losses[name], repeats) for name in ready}
                self._changes.reply(
                    step,
                    {
                        name: {"changes": figures.view(torch.int64)}
                        for name, figures in figures_by_party.items()
                    },
                )


def _compute_figures(losses: list[float], repeats: int) -> Tensor:
    """Returns the mean loss of quality of each column over its repeats, and its standard error,
    rounded to three digits: float64 [columns, 2].
    """
    lost_CR = torch.tensor(losses, dtype=torch.float64).view(-1, repeats)
    found_C2 = torch.stack([lost_CR.mean(dim=1), lost_CR.std(dim=1) / repeats**0.5], dim=1)
    return torch.tensor(
        [[float(f"{value:.{_DIGITS}g}") for value in row] for row in found_C2.tolist()],
        dtype=torch.float64,
    )


def rank_columns(names: list[str], figures_C2: Tensor) -> dict[str, Any]:
    """Returns {"columns": [name, value and standard error of each column]}, the largest absolute
    value first. ``figures_C2``: the values and standard errors, [columns, 2].
    """
    rows = [
        {"name": name, "value": value, "error": error}
        for name, (value, error) in zip(names, figures_C2.tolist(), strict=True)
    ]
    return {"columns": sorted(rows, key=lambda row: -abs(row["value"]))}


class ImportanceWriter:
    """Writes the importance of a party's columns to a file in the party's run folder, which only
    its owner may read.
    """

    def __init__(self, party: Party, phase: str, settings: EvaluateSettings) -> None:
        self.folder: Path | None = None
        self._party, self._phase, self._settings = party, phase, settings

    def __call__(self, ranking: dict[str, Any]) -> None:
        """Writes a ranking that ``rank_columns`` has returned. Raises InputError if the file cannot
        be written.
        """
        if self.folder is None:
            return
        task = self._party.recipe.task
        metric = select_metric(task, self._phase, self._settings.metric)
        facts = {"metric": metric, "split": "validation"}
        with private_file(self.folder / FILE) as file:
            file.write(to_json(facts | ranking).encode())
        texts = [f"{column['name']} {column['value']:g}" for column in ranking["columns"][:_LOGGED]]
        more = len(ranking["columns"]) - len(texts)
        log.info(
            "phase %s: loss of validation %s by permuting a column of %s: %s%s",
            self._phase,
            metric,
            self._party.name,
            ", ".join(texts),
            f" and {more} more" if more else "",
            extra={"event": "importance"},
        )


def traffic(
    party: Party, exchange: Exchange, settings: EvaluateSettings, first: StepKey
) -> tuple[list[Occurrence], list[str]]:
    """Returns the occurrences, starting at the step ``first``, and the parties whose number of
    columns is unknown here, so that their occurrences are missing. ``exchange``: the exchange of
    embeddings.
    """
    columns_by_party = {
        member.name: len(get_column_names(member))
        for member in (party, *party.exchanges.others.values())
        if member.role == "passive" and member.rows.features is not None
    }
    row_chunks, repeats = split_into_chunks(party.rows.get("validation")), settings.repeats
    num_messages = {
        name: count * repeats * len(row_chunks) for name, count in columns_by_party.items()
    }
    passives = [passive.name for passive in party.recipe.passives]
    occurrences = [Occurrence.of(COUNT, first)] if passives else []
    for done in range(max(num_messages.values(), default=-1) + 1):
        step, rows = (
            first._replace(batch=first.batch + 1 + done),
            len(row_chunks[done % len(row_chunks)]),
        )
        make = partial(Occurrence.of, exchange, step, rows=rows)
        for name, total in num_messages.items():
            if done < total:
                occurrences.append(replace(make(width=party.exchanges.widths[name]), party=name))
            elif done == total:
                answer = Occurrence.of(CHANGES, step, columns=columns_by_party[name])
                occurrences.append(replace(answer, party=name))
    return occurrences, [name for name in passives if name not in columns_by_party]
