"""Makes the files of ``vfl new``: a recipe, and a party file without default values. The presets of
``--protect`` have training settings and measured leakage.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from vfl.measured import ALONE, MEASURED, WHERE
from vfl.new.options import get_reading_keys
from vfl.new.rules import Kind, Look, ModelSizes, Task
from vfl.simulation.federation import to_lines, to_toml
from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.config.party import PartyFile
from vfl_common.config.recipe import Recipe
from vfl_common.config.sources import is_path, resolve_source
from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic

_HEADER = (
    "# The same at every party; written by `vfl new recipe`. docs/reference/recipe.md has all "
    "keys.\n"
)


def make_recipe_tables(
    name: str,
    task: Task,
    active: str,
    passives: tuple[str, ...],
    rows: Mapping[str, Any],
    training: Mapping[str, Any],
    *,
    features: bool,
) -> dict[str, Any]:
    """Returns the tables of a recipe.

    Args:
        name: the recipe's name.
        task: the prediction task.
        active, passives: the names of the parties.
        rows: the table ``[rows]``.
        training: the tables about the model and the training.
        features: whether the active party has feature columns.
    """
    task_table: dict[str, Any] = {"kind": task.kind} | (
        {"classes": task.classes} if task.classes is not None else {}
    )
    task_table |= {"positive": task.positive} if task.positive is not None else {}
    active_table: dict[str, Any] = {"name": active, "role": "active"} | (
        {} if features else {"features": False}
    )
    return {
        "name": name,
        "task": task_table,
        "parties": [active_table, *({"name": passive, "role": "passive"} for passive in passives)],
        "rows": dict(rows),
        **training,
    }


def make_split_training(sizes: ModelSizes, kind: Kind) -> dict[str, Any]:
    """Returns the tables of a recipe about split training.

    The top model has a hidden layer, because a linear top model only adds the parties' embeddings
    and cannot learn interactions between their columns. Only classifications use dropout. In a
    regression, dropout would add noise to the prediction.
    """
    splitnn = {
        "kind": "splitnn",
        "epochs": sizes.epochs,
        "batch_size": sizes.batch_size,
        "optimizer": {"kind": "adam", "lr": 2e-3, "weight_decay": 1e-4},
        "early_stopping": {"patience": sizes.patience, "metric": "loss"},
    }
    return {
        "model": {
            "embedding_size": sizes.embedding_size,
            # The other parties' columns are unknown. This encoder accepts numbers and categories.
            "encoder": {"kind": "tabular", "hidden": [sizes.hidden]}
            | ({} if kind == "regression" else {"dropout": 0.1}),
            "top": {"hidden": [sizes.top]},
        },
        "phases": [splitnn, {"kind": "evaluate"}],
    }


def make_party_tables(
    name: str,
    recipe: Path,
    server: str,
    advertise: str | None,
    table: DataSettings,
    id_: tuple[str, ...],
    look: Look,
    *,
    label: str | None,
    out: Path,
    trees: bool,
) -> dict[str, Any]:
    """Returns the keys of a party file in the folder ``out``.

    ``advertise``: as in ``PartyFile``. ``table``: the data settings. ``look``: the contents of the
    table. ``trees``: whether the recipe grows trees.
    """
    data: dict[str, Any] = {
        "source": _make_source_relative(table.source, out),
        **get_reading_keys(table),
        "id": id_[0] if len(id_) == 1 else list(id_),
    }
    if table.scratch is not None and not Path(table.scratch).is_absolute():
        data["scratch"] = make_relative(table.scratch, out)
    if label is not None:
        data["label"] = label
    if look.repeated:
        data["duplicates"] = "first"
    if look.unlabelled:
        data["unlabelled"] = "drop"
    if look.drop:
        data["drop"] = list(look.drop)
    if look.missing and not trees:
        data["missing"] = "mean"
    tables: dict[str, Any] = {
        "name": name,
        "recipe": make_relative(str(recipe), out),
        "server": server,
    }
    if advertise is not None:
        tables |= {"listen": f"0.0.0.0:{advertise.rpartition(':')[2]}", "advertise": advertise}
    tls = {"ca": "certs/ca.pem", "certificate": f"certs/{name}.pem", "key": f"certs/{name}.key"}
    return tables | {"tls": tls, "policy": {"level": "careful"}, "data": data}


def _make_source_relative(source: str, out: Path) -> str:
    """Returns a source relative to the folder ``out``. The path of an SQLite file is absolute if
    ``out`` is not the current folder.
    """
    if is_path(source):
        return make_relative(source, out)
    return source if out.resolve() == Path.cwd().resolve() else resolve_source(source, Path())


def make_relative(path: str, folder: Path) -> str:
    """Returns a path relative to ``folder``, with forward slashes; absolute if it is on another
    drive.
    """
    try:
        return Path(os.path.relpath(path, folder)).as_posix()
    except ValueError:
        return Path(path).resolve().as_posix()


def make_recipe_text(
    tables: Mapping[str, Any], where: Path, comments: Sequence[str] = ()
) -> tuple[str, Recipe]:
    """Returns the text of a recipe file, and the parsed recipe. Raises InputError if the recipe is
    invalid.

    ``comments``: lines above the tables.
    """
    lines = "".join(f"# {line}".rstrip() + "\n" for line in comments)
    return _HEADER + lines + "\n" + to_toml(tables), parse(Recipe, tables, str(where))


def make_party_text(tables: Mapping[str, Any], where: Path) -> str:
    """Returns the text of a party file, one line for each key. Raises InputError if the file is
    invalid.
    """
    parse(PartyFile, tables, str(where))
    return to_lines(tables)


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raises InputError if the file exists (unless ``force``), or its folder does not exist."""
    if path.exists() and not force:
        raise InputError(
            Code.FILE_INVALID, f"{path}: exists already. Move it away, or replace it with --force."
        )
    if not path.absolute().parent.is_dir():
        raise InputError(
            Code.FILE_INVALID, f"{path.parent}: no such folder. Create it, or give another --out."
        )


def write_all(texts: Mapping[Path, str], *, force: bool) -> None:
    """Writes files. If one cannot be written, the new files are removed. Raises InputError."""
    for path in texts:
        refuse_existing(path, force=force)
    created: list[Path] = []
    try:
        for path, text in texts.items():
            is_new = not path.exists()
            write_atomic(path, text)
            created += [path] if is_new else []
    except InputError:
        for path in created:
            path.unlink(missing_ok=True)
        raise


Protect = Literal["none", "labels", "columns", "both"]
# The choice of a training: a preset of split training, or trees.
Chosen = Literal[Protect, "trees"]
# Presets with which no message of the active party depends on labels.
LABEL_FREE = frozenset({"labels", "both"})
# The number of values per row in a passive party's upload, and the widths of narrow embeddings.
UPLOAD = 8
WIDTHS: dict[Kind, int] = {"binary": 2, "multiclass": 4, "regression": 2}
# The weight λ of MID's regularizer.
MID = 1e-3
TREES: dict[str, Any] = {"kind": "gbdt", "trees": 400, "early_stopping": 30}


def make_preset_training(sizes: ModelSizes, kind: Kind, protect: Protect) -> dict[str, Any]:
    """Returns the tables of a recipe about its training: ``model`` and ``phases``.

    Args:
        sizes: the sizes of split training.
        kind: the kind of the task.
        protect: ``none`` is split training. ``columns`` is split training with narrow, randomised
            embeddings (MID, arXiv 2301.01142). With ``labels``, each passive party uploads
            principal components of its columns once, and the active party grows trees on them.
            ``both`` is ``labels`` with fewer components.
    """
    if protect in LABEL_FREE:
        width = UPLOAD if protect == "labels" else WIDTHS[kind]
        return {
            "model": {"embedding_size": width, "top": dict(TREES)},
            "phases": [
                {"kind": "fedonce", "objective": "pca"},
                {"kind": "head"},
                {"kind": "evaluate"},
            ],
        }
    training = make_split_training(sizes, kind)
    if protect == "columns":
        model, (split, *others) = training["model"], training["phases"]
        narrow = {**model, "embedding_size": min(model["embedding_size"], WIDTHS[kind])}
        training = {"model": narrow, "phases": [{**split, "mid": MID}, *others]}
    return training


# The default presets. In a regression, trees on uploads lose too much accuracy.
DEFAULTS: dict[Kind, Protect] = {"binary": "labels", "multiclass": "labels", "regression": "none"}
_LOST = {"binary": "points of AUC", "multiclass": "points of AUC", "regression": "% of RMSE"}
_READ = {"binary": "AUC", "multiclass": "accuracy", "regression": "|ρ|"}


def make_comments(kind: Kind, chosen: Chosen) -> list[str]:
    """Returns comment lines for a recipe with the measured leakage of each preset. The chosen
    preset is marked.
    """
    heads = f"labels ({_READ[kind]}) by the others, columns (R²) by the active party"
    return [
        f"Leakage in rehearsed attacks, the highest of {WHERE[kind]},",
        "and mean cost. Each figure is a lower bound: another attack may read more.",
        f"{heads}.",
        f"From its own columns, without any message, it predicts columns up to {ALONE[kind]:.2f}.",
        "Your own columns, and a changed recipe, differ: rehearse them with vfl leaks.",
        *(
            f"{'>' if name == chosen else ' '} {_option(name)}: {describe_leakage(kind, name)}"
            for name in (*get_args(Protect), "trees")
        ),
    ]


def describe_leakage_with_units(kind: Kind, preset: str) -> str:
    """Returns the leakage and cost of a preset as text with units."""
    return describe_leakage(kind, preset, f" ({_READ[kind]})", " (R²)")


def describe_leakage(kind: Kind, preset: str, label_unit: str = "", column_unit: str = "") -> str:
    """Returns the leakage and cost of a preset, or of ``trees``, as text. ``label_unit``,
    ``column_unit``: texts after the figures.
    """
    measured = MEASURED[kind].get(preset)
    if preset in LABEL_FREE:
        labels = ": none sent (by structure, tested)"
    elif measured is None or measured.labels is None:
        labels = " not measured"
    else:
        labels = f" at least {measured.labels:.2f}{label_unit}"
    if measured is None:
        return f"labels{labels}, columns not measured; cost not measured"
    text = f"labels{labels}, columns at least {measured.columns:.2f}{column_unit}"
    if preset == "none":
        return text
    # A gain is within the noise of two seeds, so it is not reported.
    costs = f"{measured.lost:.1f} {_LOST[kind]}" if measured.lost >= 0.05 else "nothing measurable"
    return f"{text}; costs {costs}"


def _option(name: str) -> str:
    return "--method secureboost" if name == "trees" else f"--protect {name}"
