"""One party's trained models, to use without the other parties: of a finished run (``Model``),
or of a round, which the callback ``on_round`` gets (``Round``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.library.plugins import with_plugins
from vfl_common.config.recipe import Recipe as Settings
from vfl_common.errors import Code, InputError
from vfl_party.base.plugins import RunPlugins

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vfl_party.predict.trained import TrainedParty


class Model:
    """One party's trained models, on the CPU, in evaluation mode.

    ``party``, ``run_id``: the party and its run. ``encoder``: the party's encoder; None if the
    party has only labels. ``top``: the top model on all parties' embeddings; None for a passive
    party. ``tail``: the upper half of a network that is split between the parties, if there is one;
    the input of ``top`` is then ``tail.features`` of the embeddings. ``classes``: the classes of a
    classification, in the order of the top model's outputs; empty for a passive party.
    """

    def __init__(self, trained: TrainedParty) -> None:
        """Use ``Model.load`` or ``Run.model`` instead of this constructor."""
        self._trained = trained
        self.party, self.run_id = trained.about.party, trained.about.run_id
        self.encoder: nn.Module | None = trained.models.get("encoder")
        self.tail: nn.Module | None = trained.models.get("tail")
        self.top: nn.Module | None = trained.models.get("top")
        self.classes: tuple[str | int | float, ...] = (
            trained.labels.classes if trained.labels is not None else ()
        )

    @classmethod
    def load(
        cls, path: str | Path, party: str | None = None, *, plugins: RunPlugins | None = None
    ) -> Model:
        """Loads a party's models from a run's folder, or from a file that ``save`` has written.

        ``party``: the party's name; by default, the only party with a folder in the run, or the
        active party. ``plugins``: the plug-ins of the run, as in ``simulate``.

        The modules of custom encoders are imported from the recipe's folder if the run was made on
        this machine, and otherwise from Python's module path. Raises VflError.
        """
        from vfl.simulation.federation import Origin
        from vfl_party.assembly.trial import modules_of
        from vfl_party.predict.trained import load

        path = Path(path)
        run = path.resolve().parent if (path / "run.json").is_file() else path
        module_path: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        # Only a run on this machine records its origin.
        with contextlib.suppress(InputError):
            module_path = modules_of(Origin.of(run).base)
        with module_path, with_plugins(plugins):
            return cls(load(path, party))

    def prepare(self, rows: Any) -> tuple[Tensor, ...]:
        """Returns the encoder's arguments for rows, in the order of the rows:
        ``model.encoder(*model.prepare(rows))``.

        Args:
            rows: a pandas or polars frame, an Arrow table, or a dict of NumPy arrays with the
                columns of training; other columns, such as ids, are ignored. For images, an array
                [N, C, H, W] with this party's part of each image.

        Numbers are scaled and categories are encoded by the statistics of the training rows.
        Returns float32 [N, …], and for a tabular encoder also the codes of categories, int64
        [N, K]. Raises VflError if columns are missing or differ.
        """
        return self._trained.inputs(rows)

    def embed(self, rows: Any) -> Tensor:
        """Returns the embeddings of rows before any noise, float32 [N, D], without gradients.

        ``rows``: as in ``prepare``.
        """
        return self._trained.embed(rows)

    def save(self, path: str | Path) -> None:
        """Writes a new safetensors file for ``load``, which only you may read. Raises VflError.

        The names of tensors are their names in the modules with the prefix ``encoder.``, ``tail.``
        or ``top.``. The file is private, because it also contains column names, categories and
        statistics of the training rows.
        """
        self._trained.save(Path(path))

    def to_onnx(self, path: str | Path) -> list[Path]:
        """Exports the encoder to ONNX. Its inputs are the party's raw columns. Returns the new
        files, which only you may read.

        ``path``: the new file, NAME.onnx. The active party also gets NAME-top.onnx, the top model,
        whose inputs are the embeddings of all parties. NAME.json and the files' metadata describe
        inputs and outputs. The number of rows may vary. The files are private, because they contain
        column names, categories and statistics. Needs the extra ``onnx``. Raises VflError, for
        example if the encoder cannot be exported.
        """
        from vfl_party.predict.to_onnx import export

        return export(self._trained, Path(path))

    def __repr__(self) -> str:
        has = [name for name in ("encoder", "tail", "top") if getattr(self, name) is not None]
        return f"Model({self.party!r} of {self.run_id}: {', '.join(has)})"


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
