"""One party's trained models, to use without the others."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.library.plugins import with_plugins
from vfl_common.errors import InputError
from vfl_party.base.plugins import RunPlugins

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vfl_party.predict.trained import TrainedParty


class Model:
    """One party's trained models, on the CPU, in evaluation mode.

    ``party``, ``run_id``: the party and its run. ``encoder``: the party's encoder; None if it has
    labels only. ``top``: the active party's model on all parties' embeddings; None at the others.
    ``tail``: its half of a network that is cut in two; ``top`` takes ``tail.features`` of what
    ``embed`` returns; None otherwise. ``classes``: the classes of a classification at the active
    party, in the order of the top model's outputs.
    """

    def __init__(self, trained: TrainedParty) -> None:
        """Use ``Model.load`` or ``Run.model``."""
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

        ``party``: its name; if not given, the only party whose folder is there, or the active one.
        ``plugins``: those with which the run was made, as in ``simulate``.
        Custom encoders are found where the run found them, on this machine, or where Python finds
        modules. Raises VflError.
        """
        from vfl.simulation.origin import Origin
        from vfl_party.assembly.trial import modules_of
        from vfl_party.predict.trained import load

        path = Path(path)
        run = path.resolve().parent if (path / "run.json").is_file() else path
        own: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        # A run of separate machines records no origin.
        with contextlib.suppress(InputError):
            own = modules_of(Origin.of(run).base)
        with own, with_plugins(plugins):
            return cls(load(path, party))

    def prepare(self, rows: Any) -> tuple[Tensor, ...]:
        """Returns what the encoder is called with for rows, in their order:
        ``model.encoder(*model.prepare(rows))``.

        Args:
            rows: a pandas or polars frame, an Arrow table, or a dict of NumPy arrays with the
                columns of training; more columns, such as ids, are left out. For images an array
                [N, C, H, W]: this party's part of each.

        Numbers are scaled, and categories coded, by the statistics of the training rows. Returns
        float32 [N, …]; a tabular encoder also takes int64 [N, K]. Raises VflError if columns are
        missing or differ.
        """
        return self._trained.inputs(rows)

    def embed(self, rows: Any) -> Tensor:
        """Returns the embeddings of rows, float32 [N, D], without gradient: what the party computes
        before any noise.

        ``rows``: as for ``prepare``.
        """
        return self._trained.embed(rows)

    def save(self, path: str | Path) -> None:
        """Writes a new safetensors file, which only you may read, with all that ``load`` needs.
        Raises VflError.

        Tensors have their names in the modules, after ``encoder.``, ``tail.`` or ``top.``. It holds
        column names, categories and statistics of the training rows too: private.
        """
        self._trained.save(Path(path))

    def to_onnx(self, path: str | Path) -> list[Path]:
        """Writes the encoder as ONNX: it takes the party's own columns, as they are. Returns the
        new files, which only you may read.

        ``path``: a new file, NAME.onnx. The active party's top model is NAME-top.onnx, which takes
        the embeddings of all parties. NAME.json, and the files' metadata, say what inputs and
        outputs are; any number of rows is taken at once. Column names, categories and statistics
        are in them: private. Needs the extra ``onnx``. Raises VflError, also if the encoder cannot
        be written so.
        """
        from vfl_party.predict.to_onnx import export

        return export(self._trained, Path(path))

    def __repr__(self) -> str:
        has = [name for name in ("encoder", "tail", "top") if getattr(self, name) is not None]
        return f"Model({self.party!r} of {self.run_id}: {', '.join(has)})"
