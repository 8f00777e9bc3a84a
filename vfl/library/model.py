"""One party's trained models, to use without the other parties."""

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
        from vfl.simulation.origin import Origin
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
