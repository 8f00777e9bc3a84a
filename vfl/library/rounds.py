"""The argument of the callback ``on_round``: a finished round and the party's models."""

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

# The maximum wait for a checkpoint, which a party writes while its next round runs.
_WAIT_S = 10.0
_TICK_S = 0.02


@dataclass(frozen=True)
class Round:
    """A finished round of a party.

    ``round``: the number of the round, from 1 to ``rounds``. ``metrics``: {split: {name: value}};
    in split training, only the active party has metrics.
    """

    party: str
    phase: str
    round: int
    rounds: int
    metrics: dict[str, dict[str, float]]
    _models: RoundModels | None = field(default=None, repr=False, compare=False)

    def model(self) -> Model:
        """Returns copies of the party's models after this round, as ``Run.model`` does.

        Models are copied only if this method is called. Call it inside ``on_round``. With
        ``processes=True``, the models are read from the party's checkpoint, so the call fails for a
        round without a checkpoint (``run.checkpoint_every``). Raises VflError.
        """
        from vfl.library.model import Model

        if self._models is None:
            raise InputError(
                Code.CONFIG_INVALID,
                "round: has no models. Call model() of a round that was passed to on_round.",
            )
        return Model(self._models.take())


class RoundModels:
    """Copies a party's models after a round. It refuses copies after ``on_round`` has returned."""

    def __init__(self, make: Callable[[], TrainedParty]) -> None:
        self._make: Callable[[], TrainedParty] | None = make

    def take(self) -> TrainedParty:
        """Returns copies of the models. Raises InputError if the party has continued to train."""
        if self._make is None:
            raise InputError(
                Code.CONFIG_INVALID,
                "round: the party has continued, and its models have changed. Call model() inside "
                "on_round.",
            )
        return self._make()

    def close(self) -> None:
        """Refuses further copies."""
        self._make = None


class RoundReporter:
    """Calls ``on_round``. If ``on_round`` raises an exception, ``error`` stores it."""

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
        round_models = RoundModels(models)
        try:
            self._on_round(Round(party, phase, round_, rounds, metrics, round_models))
        except BaseException as error:
            self.error = error
            raise
        finally:
            round_models.close()


def read_round_models(
    run: Path, settings: Settings, party: str, phase: str, round_: int, *, last: bool
) -> TrainedParty:
    """Reads a party's models after a round from the checkpoint that the party's process wrote.
    Raises InputError if there is no such checkpoint.

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
                f"every {every} rounds, and stores the last {number}. Set run.checkpoint_every, or "
                "processes=False.",
            )
        time.sleep(_TICK_S)
