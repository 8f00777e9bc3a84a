"""Permutation importance of each party's own columns (Breiman 2001), computed together.

A party replaces the values of a column in the validation rows by those of other rows and sends the
embeddings; the active party answers once, and only this party, with the loss of quality. Names and
values stay at the party that owns them. The active party learns the number of columns.

A metric depends on the labels, and a malicious party can send arbitrary embeddings: answers of full
precision could disclose all labels (Aggarwal et al. 2021). Each answer therefore has two numbers of
three digits for each column.
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
from vfl_party.base.seeds import derive_seed, permutation
from vfl_party.methods.evaluate.quality import metric_of
from vfl_party.methods.evaluate.settings import EvaluateSettings
from vfl_party.outbound.declared import NOTHING, Exchange, Occurrence, Sent, i64
from vfl_party.outbound.exchange import Answering, Asking
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import Chunk, chunks

log = logging.getLogger(__name__)

FILE = "importance.json"
# The number of columns that the log names.
_LOGGED = 10
# The most columns of one party; more are probably a mistake.
_MAX_COLUMNS = 10_000
# Significant digits of an answer.
_DIGITS = 3
# The name under which an image, which has no columns, is listed.
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


def names_of(party: Party) -> list[str]:
    """Returns the names of a party's columns; images have a single name."""
    return list(party.need_features().columns) or [_IMAGE]


@torch.no_grad()
def permute_columns(
    party: Party, phase: str, settings: EvaluateSettings
) -> Iterator[tuple[str, Iterator[Tensor]]]:
    """Yields, for each column and repeat, its name and a party's own embeddings of the validation
    rows with the column permuted, a chunk at a time.
    """
    features, rows = party.need_features(), party.rows("validation")
    party.models["encoder"].eval()
    for place, name in enumerate(names_of(party)):
        column = name if features.columns else None
        for repeat in range(settings.repeats):
            # The party's own seed hides from the others which row got which value.
            seed = derive_seed(party.own_seed, "importance", phase, place, repeat)
            others = rows[permutation(seed, len(rows))]
            pairs = zip(chunks(rows), chunks(others), strict=True)
            yield (
                name,
                (
                    party.encode(*features.with_column_of(mine, theirs, column))
                    for mine, theirs in pairs
                ),
            )


class PassiveImportance:
    """A passive party's side. ``asking``: its side of the exchange of embeddings."""

    def __init__(
        self, party: Party, phase: str, settings: EvaluateSettings, asking: Asking
    ) -> None:
        self._party, self._phase, self._settings = party, phase, settings
        self._embeddings = asking
        self._count = party.asking(phase, COUNT)
        self._changes = party.asking(phase, CHANGES)

    def run(self, first: StepKey) -> dict[str, Any]:
        """Runs the exchanges from the step ``first`` on. Returns the importance of this party's
        columns for ``ImportanceWriter``. Raises as ``Asking.swap``.
        """
        names, batch = names_of(self._party), first.batch
        self._count.swap(first, {"columns": torch.tensor([len(names)])})
        for _, embeddings in permute_columns(self._party, self._phase, self._settings):
            for z_BD in embeddings:
                batch += 1
                at = first._replace(batch=batch)
                self._embeddings.swap(at, {"z": z_BD}, self._party.rows("validation"))
        answer = self._changes.take(first._replace(batch=batch + 1), columns=len(names))
        return rank_columns(names, answer["changes"].cpu().view(torch.float64))


class ActiveImportance:
    """The active party's side.

    Args:
        answering: its side of the exchange of embeddings.

    Raises InputError if there are no validation rows.
    """

    def __init__(
        self, party: Party, phase: str, settings: EvaluateSettings, answering: Answering
    ) -> None:
        self._party, self._phase, self._settings = party, phase, settings
        self._embeddings = answering
        self._count = party.answering(phase, COUNT)
        self._changes = party.answering(phase, CHANGES)
        if not len(party.rows("validation")):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: importance needs validation rows (got none). Set "
                "rows.validation.",
            )

    def run(
        self, first: StepKey, chunks: list[Chunk], change: Callable[[list[Chunk]], float]
    ) -> dict[str, Any] | None:
        """Runs the exchanges from the step ``first`` on. Returns the importance of this party's own
        columns for ``ImportanceWriter``; None if it has no columns.

        Args:
            first: the first step.
            chunks: the embeddings of all parties for the validation rows.
            change: computes the loss of quality with other embeddings in their place.

        Raises as ``Answering.collect``.
        """
        party, repeats = self._party, self._settings.repeats
        passives = [passive.name for passive in party.recipe.passives]
        if passives:
            columns = self._collect_counts(first)
            self._answer(first, columns, chunks, change)
        if party.features is None:
            return None
        lost = [
            change([Chunk([z], of.others, of.rows) for z, of in zip(own, chunks, strict=True)])
            for _, own in permute_columns(party, self._phase, self._settings)
        ]
        return rank_columns(names_of(party), _figures(lost, repeats))

    def _collect_counts(self, step: StepKey) -> dict[str, int]:
        """Returns {passive party: its number of columns}."""
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
        """Collects embeddings from the parties that have columns left, and answers the others."""
        repeats, parts = self._settings.repeats, len(chunks)
        sends = {name: count * repeats * parts for name, count in columns.items()}
        mixed: dict[str, list[Chunk]] = {name: [] for name in sends}
        lost: dict[str, list[float]] = {name: [] for name in sends}
        for done in range(max(sends.values()) + 1):
            step, part = first._replace(batch=first.batch + 1 + done), chunks[done % parts]
            senders = {name: {"rows": part.rows} for name, total in sends.items() if done < total}
            received = self._embeddings.collect(step, each=senders) if senders else {}
            if senders:
                self._embeddings.acknowledge(step, received)
            for name, tensors in received.items():
                others = {**part.others, name: tensors["z"]}
                mixed[name].append(Chunk(part.own, others, part.rows))
                if len(mixed[name]) == parts:
                    lost[name].append(change(mixed[name]))
                    mixed[name] = []
            ready = [name for name, total in sends.items() if done == total]
            if ready:
                self._changes.collect(step, each={name: {} for name in ready})
                found_of = {name: _figures(lost[name], repeats) for name in ready}
                self._changes.reply(
                    step,
                    {
                        name: {"changes": figures.view(torch.int64)}
                        for name, figures in found_of.items()
                    },
                )


def _figures(lost: list[float], repeats: int) -> Tensor:
    """Returns the mean over the repeats of each column and its standard error, float64 [columns,
    2], of three digits.
    """
    lost_CR = torch.tensor(lost, dtype=torch.float64).view(-1, repeats)
    found_C2 = torch.stack([lost_CR.mean(dim=1), lost_CR.std(dim=1) / repeats**0.5], dim=1)
    return torch.tensor(
        [[float(f"{value:.{_DIGITS}g}") for value in row] for row in found_C2.tolist()],
        dtype=torch.float64,
    )


def rank_columns(names: list[str], figures_C2: Tensor) -> dict[str, Any]:
    """Returns {"columns": name, value and standard error of each column}, the largest value first.
    ``figures_C2``: the values and errors.
    """
    rows = [
        {"name": name, "value": value, "error": error}
        for name, (value, error) in zip(names, figures_C2.tolist(), strict=True)
    ]
    return {"columns": sorted(rows, key=lambda row: -abs(row["value"]))}


class ImportanceWriter:
    """Writes the importance of a party's columns into a file in its folder of the run, which only
    its owner may read.
    """

    def __init__(self, party: Party, phase: str, settings: EvaluateSettings) -> None:
        self.folder: Path | None = None
        self._party, self._phase, self._settings = party, phase, settings

    def __call__(self, ranking: dict[str, Any]) -> None:
        """Writes what ``rank_columns`` has returned. Raises InputError."""
        if self.folder is None:
            return
        task = self._party.recipe.task
        metric = metric_of(task, self._phase, self._settings.metric)
        facts = {"metric": metric, "split": "validation"}
        with private_file(self.folder / FILE) as file:
            file.write(to_json(facts | ranking).encode())
        parts = [f"{column['name']} {column['value']:g}" for column in ranking["columns"][:_LOGGED]]
        more = len(ranking["columns"]) - len(parts)
        log.info(
            "phase %s: loss of validation %s by permuting a column of %s: %s%s",
            self._phase,
            metric,
            self._party.name,
            ", ".join(parts),
            f" and {more} more" if more else "",
            extra={"event": "importance"},
        )


def traffic(
    party: Party, exchange: Exchange, settings: EvaluateSettings, first: StepKey
) -> tuple[list[Occurrence], list[str]]:
    """Returns the occurrences from the step ``first`` on, and the parties whose columns are not
    here, so that their occurrences are missing. ``exchange``: that of the embeddings.
    """
    known = {
        known_party.name: len(names_of(known_party))
        for known_party in (party, *party.others.values())
        if known_party.role == "passive" and known_party.features is not None
    }
    parts, repeats = chunks(party.rows("validation")), settings.repeats
    sends = {name: count * repeats * len(parts) for name, count in known.items()}
    passives = [passive.name for passive in party.recipe.passives]
    occurrences = [Occurrence.of(COUNT, first)] if passives else []
    for done in range(max(sends.values(), default=-1) + 1):
        step, rows = first._replace(batch=first.batch + 1 + done), len(parts[done % len(parts)])
        make = partial(Occurrence.of, exchange, step, rows=rows)
        for name, total in sends.items():
            if done < total:
                occurrences.append(replace(make(width=party.widths[name]), party=name))
            elif done == total:
                answer = Occurrence.of(CHANGES, step, columns=known[name])
                occurrences.append(replace(answer, party=name))
    return occurrences, [name for name in passives if name not in known]
