"""Loads a trained party's models from a run's folder or from an exported safetensors file.

A tensor's name in the file is its name in the module, with the prefix ``encoder.``, ``tail.`` or
``top.``. The entry ``about`` of the file's metadata is JSON with the keys of ``About``. It
describes how to build the modules and how to prepare rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import safe_open
from torch import Tensor, nn

from vfl_common.config.data import DataSettings
from vfl_common.config.models import EncoderSettings
from vfl_common.config.recipe import Recipe
from vfl_common.config.sources import FRAME
from vfl_common.errors import Code, InputError
from vfl_common.files import private_file
from vfl_common.run_folder import RunFolder
from vfl_common.stages import parse_rounds_done
from vfl_party.assembly.models import build_models, load_models
from vfl_party.base.checkpoint import CheckpointStore
from vfl_party.base.phase import Tree
from vfl_party.data import Labels, Preprocessor, Table, make_loader
from vfl_party.data.pixels import in_numbers
from vfl_party.data.row_arrays import IN_MEMORY
from vfl_party.data.sources.arrays import channels_first, row_ids
from vfl_party.data.sources.frames import as_arrow, is_arrays
from vfl_party.models import deterministic, forward
from vfl_party.phases.context import MakeEncoder
from vfl_party.phases.course import Course
from vfl_party.phases.online import Cells
from vfl_party.phases.scoring import split_into_chunks
from vfl_party.predict.run import load_trained

SUFFIX = ".safetensors"
# The name of the column that replaces the ids, which embeddings do not need.
_ROW = "number of the row"


class About(BaseModel):
    """Metadata of a party's models.

    ``preprocessor`` and ``labels`` have the results of ``Preprocessor.state`` and ``Labels.state``.
    """

    model_config = ConfigDict(frozen=True)

    run_id: str
    party: str
    recipe_digest: str
    recipe: Recipe
    encoder: EncoderSettings
    preprocessor: dict[str, Any] | None
    labels: dict[str, Any] | None


@dataclass(frozen=True, eq=False)
class TrainedParty:
    """One party's trained models, on the CPU and in evaluation mode.

    ``models``: {name: module}. A party with features has ``encoder``. The active party has ``top``
    and the models of ``Method.upper``.
    """

    about: About
    models: Mapping[str, nn.Module]
    preprocessor: Preprocessor | None
    labels: Labels | None

    def inputs(self, rows: Any) -> tuple[Tensor, ...]:
        """Returns the encoder's inputs for rows in memory, in the order of the rows.

        Args:
            rows: A data frame or a dict of arrays with the columns of training. For images, an
                array [N, C, H, W] of the party's part of each image, as bytes or as numbers in the
                scale of training.

        Returns float32 [N, …] and, for a tabular encoder, int64 [N, K] codes. Raises InputError if
        the columns differ from those of training.
        """
        preprocessor, table = self._read(rows)
        return preprocessor.transform(table).inputs(np.arange(len(table), dtype=np.int64))

    def cells(self, rows: Any) -> Cells:
        """Returns the columns of rows in memory in the form that trees need.

        ``rows``: See ``inputs``. Raises InputError if the columns differ from those of training.
        """
        preprocessor, table = self._read(rows)
        return preprocessor.cells(table)[:2]

    def _read(self, rows: Any) -> tuple[Preprocessor, Table]:
        """Returns the preprocessor and a table of rows in memory.

        Raises InputError if the party has no features, or if columns are missing or invalid.
        """
        name, preprocessor = self.about.party, self.preprocessor
        if preprocessor is None:
            raise InputError(
                Code.DATA_INVALID,
                f"{name}: has labels only, so it has no encoder. Choose a party with features.",
            )
        source, shape = f"{FRAME}{name}", preprocessor.image_shape
        if shape is not None:
            images = channels_first(source, np.asarray(rows), (shape[0], shape[1], shape[2]))
            table = Table(
                source, tuple(row_ids(len(images))), images_NCHW=in_numbers(images, IN_MEMORY)
            )
        else:
            frame, ids = rows, tuple[str, ...]()
            if not is_arrays(rows):
                arrow, ids = as_arrow(rows, source), (_ROW,)
                frame = arrow.append_column(_ROW, [row_ids(arrow.num_rows)])
            settings = DataSettings(
                source=source,
                id=ids,
                columns=(*preprocessor.numeric_names, *preprocessor.categorical_names),
                numeric=preprocessor.numeric_names,
                as_trained=True,
                categorical=preprocessor.categorical_names,
                missing="error" if preprocessor.fill is None else "zero",
            )
            table = make_loader({name: frame})(settings, False)
        return preprocessor, table

    @torch.no_grad()
    def embed(self, rows: Any) -> Tensor:
        """Returns the embeddings or latents [N, D] of rows in memory, without noise.

        ``rows``: See ``inputs``. Raises InputError if the run trained no encoder.
        """
        if self.preprocessor is not None and "encoder" not in self.models:
            kinds = ", ".join(phase.kind for phase in self.about.recipe.phases)
            raise InputError(
                Code.CONFIG_INVALID,
                f"a run of {kinds} trains no encoder, so its rows have no embeddings. Predict "
                "jointly (vfl predict).",
            )
        inputs = self.inputs(rows)
        encoder, precision = (
            deterministic(self.models["encoder"].eval()),
            self.about.recipe.model.precision,
        )
        parts = split_into_chunks(np.arange(len(inputs[0]), dtype=np.int64))
        return torch.cat(
            [
                forward(encoder, *(inputs_[part] for inputs_ in inputs), precision=precision)
                for part in parts
            ]
        )

    def save(self, path: Path) -> None:
        """Writes the models and their metadata to a file that ``load`` can read.

        Only the owner may read the file. Raises InputError if the file cannot be written.
        """
        check_path(path)
        tensors = nn.ModuleDict(self.models).state_dict()
        cpu_tensors = {
            name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()
        }
        encoded = safetensors.torch.save(cpu_tensors, {"about": self.about.model_dump_json()})
        with private_file(path) as file:
            file.write(encoded)


def check_path(path: Path) -> None:
    """Raises InputError if a model cannot be exported to ``path``."""
    if path.suffix != SUFFIX:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: the name of an exported model must end in {SUFFIX}. Give such a name.",
        )
    if path.exists():
        raise InputError(
            Code.FILE_INVALID, f"{path}: exists already. Move it away or give another name."
        )


def load(path: Path, party: str | None) -> TrainedParty:
    """Loads a party's models.

    Args:
        path: A run's folder, a party's folder in it, or an exported file.
        party: The party's name. Default: the only party in the folder, or the active party.

    Raises InputError if the models cannot be loaded.
    """
    if path.is_file():
        return _load_exported(path, party)
    if not path.exists():
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: does not exist. Give the folder OUT/RUN-ID, or an exported file.",
        )
    run, name = choose_run(path, party)
    trained = load_trained(run, name)
    return of_state(trained.run_id, name, trained.recipe, trained.encoder, trained.state)


def of_state(
    run_id: str, party: str, recipe: Recipe, encoder: EncoderSettings, state: Tree
) -> TrainedParty:
    """Builds copies of a party's models on the CPU from the state of a run.

    The run need not be finished. ``state``: The result of ``Assembled.state``. Raises InputError if
    the state does not fit the recipe.
    """
    about = About(
        run_id=run_id,
        party=party,
        recipe_digest=recipe.digest(),
        recipe=recipe,
        encoder=encoder,
        preprocessor=state["preprocessor"],
        labels=state["labels"],
    )
    return _build_party(about, state)


def of_round(
    run: Path, party: str, recipe: Recipe, encoder: EncoderSettings, phase: str, round_: int
) -> TrainedParty | None:
    """Builds a party's models from the checkpoint after ``round_`` rounds of a phase.

    The run may be in progress in other processes. Returns None if there is no such checkpoint.
    Raises InputError if the checkpoint is damaged.
    """
    store = CheckpointStore(run / party / "checkpoints", keep=1)
    label = next(
        (label_ for label_ in store.labels() if parse_rounds_done(label_) == (phase, round_)), None
    )
    if label is None:
        return None
    return of_state(run.name, party, recipe, encoder, store.load(label)["job"])


def choose_run(path: Path, party: str | None) -> tuple[Path, str]:
    """Returns the run's folder and the party's name.

    Raises InputError if the run's folder has no checkpoints of the party.
    """
    # ``path`` is a party's folder.
    if (path / "checkpoints").is_dir():
        party_folder = path.resolve()
        path, party = party_folder.parent, party or party_folder.name
    names = sorted(folder.parent.name for folder in path.glob("*/checkpoints"))
    if not names:
        raise InputError(
            Code.FILE_INVALID, f"{path}: has no checkpoints. Give the folder OUT/RUN-ID."
        )
    if party is None:
        active = RunFolder(path / names[0], path.name).recipe().active.name
        party = names[0] if len(names) == 1 else active
    if party not in names:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: has no checkpoints of {party}. Choose one of: {', '.join(names)}.",
        )
    return path, party


def _load_exported(path: Path, party: str | None) -> TrainedParty:
    try:
        # safe_open reads only the header.
        with safe_open(path, framework="np") as file:
            about = About.model_validate_json((file.metadata() or {})["about"])
        tensors = safetensors.torch.load(path.read_bytes())
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: cannot be read ({error.strerror}). Check the path and its permissions.",
        ) from None
    except (safetensors.SafetensorError, KeyError, ValidationError, ValueError, RecursionError):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: is not an exported model. Give a file that `vfl export model` wrote.",
        ) from None
    if party is not None and party != about.party:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: has the models of {about.party}. Give the file of {party}.",
        )
    models: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        model, _, name = full_name.partition(".")
        models.setdefault(model, {})[name] = tensor
    return _build_party(about, {"models": models})


def _build_party(about: About, state: Tree) -> TrainedParty:
    """Builds the modules as a run does and loads their weights. Raises InputError if this fails."""
    preprocessor = (
        Preprocessor.from_state(about.preprocessor) if about.preprocessor is not None else None
    )
    make_encoder = None
    if preprocessor is not None:
        make_encoder = MakeEncoder(about.recipe, about.party, about.encoder, preprocessor.spec)
    models = build_models(Course(about.recipe), about.party, make_encoder)
    load_models(models, state)
    labels = Labels.from_state(about.labels) if about.labels is not None else None
    return TrainedParty(
        about, {name: model.eval() for name, model in models.items()}, preprocessor, labels
    )
