"""Defines the rows of a phase's messages, and the messages that are recorded whole.

A phase of a plug-in may provide this itself. For our own methods it is defined here, so that they
need no knowledge of attacks.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vfl_common.bundle import StepKey
from vfl_party.base.phase import Phase
from vfl_party.base.plugins import name_plugin_errors
from vfl_party.base.seeds import Rows
from vfl_party.methods.head.settings import UPLOAD
from vfl_party.methods.head.upload import get_upload_splits
from vfl_party.methods.splitnn.batches import Batches
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import chunks


class Readable(Protocol):
    """The facts about a phase by which a rehearsal judges attacks.

    A plug-in's phase may have any of these members.
    """

    @property
    def overheard(self) -> frozenset[str]:
        """The names of exchanges whose messages are kept whole, for ``Scene.heard``."""
        ...

    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        """Returns the rows that an exchange is about at a step, int64 [B], in the order of its
        tensors; None if it is about no rows, or about unknown ones.
        """
        ...

    def behind(self, exchange: str) -> Tensor | None:
        """Returns the truth that the newest message of an overheard exchange hides; None if it is
        unknown.
        """
        ...


def readable(party: Party, phase: Phase) -> Readable:
    """Returns what is known about a phase of ``party``: ours from this module, others from
    themselves.
    """
    kind = next(
        (settings.kind for settings in party.recipe.phases if settings.name == phase.name), ""
    )
    return _OURS.get(kind, _OfItself)(party, phase)


class _Unknown:
    """Knows nothing: most exchanges are about no rows."""

    overheard: frozenset[str] = frozenset()

    def __init__(self, party: Party, phase: Phase) -> None:
        self._party, self._phase = party, phase

    @cached_property
    def _settings(self) -> Any:
        name = self._phase.name
        return next(phase.settings for phase in self._party.course.phases if phase.name == name)

    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        _ = exchange, step
        return None

    def behind(self, exchange: str) -> Tensor | None:
        _ = exchange
        return None


class _OfItself(_Unknown):
    """Passes on what a plug-in's phase says."""

    def __init__(self, party: Party, phase: Phase) -> None:
        super().__init__(party, phase)
        self.overheard = frozenset(getattr(phase, "overheard", ()))

    @name_plugin_errors()
    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        tell = getattr(self._phase, "rows_at", None)
        return tell(exchange, step) if tell is not None else None

    @name_plugin_errors()
    def behind(self, exchange: str) -> Tensor | None:
        tell = getattr(self._phase, "behind", None)
        return tell(exchange) if tell is not None else None


class _Evaluate(_Unknown):
    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        _ = exchange
        splits = self._settings.splits
        chunks_ = [chunk for split in splits for chunk in chunks(self._party.rows(split))]
        # Later messages, such as means, are not about rows.
        return chunks_[step.batch] if step.batch < len(chunks_) else None


class _Head(_Unknown):
    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        if exchange != "upload" or step.round != UPLOAD:
            return None
        splits = get_upload_splits(self._party.recipe)
        return np.concatenate([self._party.rows(split) for split in splits])


class _SplitNN(_Unknown):
    @cached_property
    def _batches(self) -> Batches:
        return Batches(self._party, self._phase.name, self._settings)

    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        parts = [part for batch in self._batches.plan(step.round) for part in batch.parts]
        if exchange == "embedding":
            return parts[step.batch]
        if exchange == "validation":
            return chunks(self._party.rows("validation"))[step.batch - len(parts)]
        return None


class _FedHSSL(_Unknown):
    overheard = frozenset({"weights"})


class _SecureBoost(_Unknown):
    overheard = frozenset({"sums", "partition"})

    def behind(self, exchange: str) -> Tensor | None:
        """Returns of the sums of a tree, which lie in an order that only the sender knows, the
        column of each number's entry, int64 [E].
        """
        # Imported here, because trees have additional dependencies.
        from vfl_party.methods.secureboost.passive import PassiveSecureBoost

        phase = self._phase
        if exchange != "sums" or not isinstance(phase, PassiveSecureBoost) or not phase.offered:
            return None
        offered = phase.offered
        columns = [
            offered.layout.numbers[place].column for place in offered.order[: offered.sizes[0]]
        ]
        return torch.tensor(columns, dtype=torch.int64)


_OURS: dict[str, type[_Unknown]] = {
    "evaluate": _Evaluate,
    "fedhssl": _FedHSSL,
    "head": _Head,
    "secureboost": _SecureBoost,
    "splitnn": _SplitNN,
}
