"""Defines which rows a message of a phase is about, and which messages are recorded whole.

A plug-in's phase may provide these facts itself. The facts about the built-in methods are defined
here, so that the methods need no knowledge of attacks.
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
from vfl_party.phases.scoring import split_into_chunks


class Readable(Protocol):
    """The facts about a phase by which a rehearsal judges attacks.

    A plug-in's phase may have any of these members.
    """

    @property
    def overheard(self) -> frozenset[str]:
        """The names of exchanges whose messages are kept whole, for ``Scene.heard``."""
        ...

    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        """Returns the rows of an exchange's tensors at a step, in order, int64 [B]; None if its
        tensors have no rows, or unknown rows.
        """
        ...

    def behind(self, exchange: str) -> Tensor | None:
        """Returns the secret that the newest message of an overheard exchange hides, by which
        attacks are judged; None if the phase does not know it.
        """
        ...


def find_facts(party: Party, phase: Phase) -> Readable:
    """Returns the facts about a phase of ``party``: from this module for a built-in method, and
    from the phase itself for a plug-in.
    """
    kind = next(
        (settings.kind for settings in party.recipe.phases if settings.name == phase.name), ""
    )
    return _FACTS_BY_KIND.get(kind, _PluginFacts)(party, phase)


class _PhaseFacts:
    """The facts about a phase whose exchanges have no known rows, as most phases do."""

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


class _PluginFacts(_PhaseFacts):
    """Passes on the facts that a plug-in's phase provides about itself."""

    def __init__(self, party: Party, phase: Phase) -> None:
        super().__init__(party, phase)
        self.overheard = frozenset(getattr(phase, "overheard", ()))

    @name_plugin_errors()
    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        plugin_rows_at = getattr(self._phase, "rows_at", None)
        return plugin_rows_at(exchange, step) if plugin_rows_at is not None else None

    @name_plugin_errors()
    def behind(self, exchange: str) -> Tensor | None:
        plugin_behind = getattr(self._phase, "behind", None)
        return plugin_behind(exchange) if plugin_behind is not None else None


class _EvaluateFacts(_PhaseFacts):
    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        _ = exchange
        splits = self._settings.splits
        chunks_ = [
            chunk for split in splits for chunk in split_into_chunks(self._party.rows(split))
        ]
        # Later messages, such as means, have no rows.
        return chunks_[step.batch] if step.batch < len(chunks_) else None


class _HeadFacts(_PhaseFacts):
    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        if exchange != "upload" or step.round != UPLOAD:
            return None
        splits = get_upload_splits(self._party.recipe)
        return np.concatenate([self._party.rows(split) for split in splits])


class _SplitNNFacts(_PhaseFacts):
    @cached_property
    def _batches(self) -> Batches:
        return Batches(self._party, self._phase.name, self._settings)

    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        batches = [part for batch in self._batches.plan(step.round) for part in batch.parts]
        if exchange == "embedding":
            return batches[step.batch]
        if exchange == "validation":
            return split_into_chunks(self._party.rows("validation"))[step.batch - len(batches)]
        return None


class _FedHSSLFacts(_PhaseFacts):
    overheard = frozenset({"weights"})


class _SecureBoostFacts(_PhaseFacts):
    overheard = frozenset({"sums", "partition"})

    def behind(self, exchange: str) -> Tensor | None:
        """Returns the column of each sum of a tree, int64 [E]. Only the sender knows the order of
        the sums.
        """
        # Imported here, because trees have additional dependencies.
        from vfl_party.methods.secureboost.passive import PassiveSecureBoost

        phase = self._phase
        if exchange != "sums" or not isinstance(phase, PassiveSecureBoost) or not phase.offered:
            return None
        offer = phase.offered
        columns = [offer.layout.numbers[place].column for place in offer.order[: offer.sizes[0]]]
        return torch.tensor(columns, dtype=torch.int64)


_FACTS_BY_KIND: dict[str, type[_PhaseFacts]] = {
    "evaluate": _EvaluateFacts,
    "fedhssl": _FedHSSLFacts,
    "head": _HeadFacts,
    "secureboost": _SecureBoostFacts,
    "splitnn": _SplitNNFacts,
}
