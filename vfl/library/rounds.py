"""The argument of ``on_round``: a round that a party has finished, and its models."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vfl_common.config.recipe import Recipe as Settings
from vfl_common.errors import Code, InputError

if TYPE_CHECKING:
    from vfl.library.model import Model
    from vfl_party.predict.trained import TrainedParty

OnRound = Callable[["Round"], None]

# A party writes a checkpoint while its next round runs.
_WAIT_S = 10.0
_TICK_S = 0.02


@dataclass(frozen=True)
class Round:
    """A round that a party has finished.

    ``round``: from 1 to ``rounds``. ``metrics``: {split: {name: value}}; in split training, the
    active party has them.
    """

    party: str
    phase: str
    round: int
    rounds: int
    metrics: dict[str, dict[str, float]]
    _models: RoundModels | None = field(default=None, repr=False, compare=False)

    def model(self) -> Model:
        """Returns the party's models as they are after this round: copies, as ``Run.model`` gives
        them.

        Nothing is copied unless this is called. Call it while ``on_round`` runs. With processes
        the models are those of the party's checkpoint, so it fails for a round after which the
        party writes none (``run.checkpoint_every``). Raises VflError.
        """
        from vfl.library.model import Model

        if self._models is None:
            raise InputError(
                Code.CONFIG_INVALID,
                "round: has no models. Call model() of a round that on_round got.",
            )
        return Model(self._models.take())


class RoundModels:
    """Makes a party's models after a round, until ``on_round`` returns."""

    def __init__(self, make: Callable[[], TrainedParty]) -> None:
        self._make: Callable[[], TrainedParty] | None = make

    def take(self) -> TrainedParty:
        """Makes copies. Raises InputError if the party has gone on."""
        if self._make is None:
            raise InputError(
                Code.CONFIG_INVALID,
                "round: the party has gone on, and its models have changed. Call model() inside "
                "on_round.",
            )
        return self._make()

    def close(self) -> None:
        """Refuses further copies."""
        self._make = None


class Telling:
    """Calls ``on_round``, and stores what it raises in ``error`` (None if nothing)."""

    def __init__(self, on_round: OnRound) -> None:
        self._on_round = on_round
        self.error: BaseException | None = None

    def __call__(
        self,
        party: str,
        phase: str,
        round_: int,
        rounds: int,
        metrics: dict[str, dict[str, float]],
        models: Callable[[], TrainedParty],
    ) -> None:
        closing = RoundModels(models)
        try:
            self._on_round(Round(party, phase, round_, rounds, metrics, closing))
        except BaseException as error:
            self.error = error
            raise
        finally:
            closing.close()


def of_checkpoint(
    run: Path, settings: Settings, party: str, phase: str, round_: int, *, last: bool
) -> TrainedParty:
    """Reads a party's models after a round of a run of other processes. Raises InputError if they
    are not on disk.

    ``last``: whether it is the phase's last round, after which a checkpoint is always written.
    """
    from vfl_party.assembly.models import encoder_settings
    from vfl_party.predict.trained import of_round

    encoder, end_s = encoder_settings(settings, party, None), time.monotonic() + _WAIT_S
    while True:
        models = of_round(run, party, settings, encoder, phase, round_)
        if models is not None:
            return models
        every, number = settings.run.checkpoint_every, settings.run.kept_checkpoints + 1
        if time.monotonic() > end_s or not (last or round_ % every == 0):
            raise InputError(
                Code.CHECKPOINT_INVALID,
                f"round: {party} has no checkpoint of round {round_} of {phase}. It writes one "
                f"after every round that {every} divides, and stores {number}. Set "
                "run.checkpoint_every, or processes=False.",
            )
        time.sleep(_TICK_S)
