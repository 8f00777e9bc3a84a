"""ModelNet10 and ModelNet40 (Wu et al. 2015): views of objects, rendered as images."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from vfl_common.errors import Code, InputError
from vfl_papers.dataset import TEST, TRAIN, Content, DataSet, Files, Form, Need, PaperUse, Request
from vfl_papers.families.pictured import Pictured, views
from vfl_papers.formats.trees import folders_in, images_in
from vfl_party.base.seeds import derive_seed, draw_permutation

VIEWS = 12
# airplane_0001_001.png, airplane_0001.1.png, airplane_0001-1.jpg.
_NAME = re.compile(r"(?P<object>.+)[._-](?P<view>\d+)")
_SAMPLES = "the maximum number of rows of an object, each with other views"


def modelnet(
    title: str, objects: int, size: int, folders: Sequence[str], uses: tuple[PaperUse, ...]
) -> DataSet:
    """Returns a ModelNet data set.

    Args:
        title: its name.
        objects: the number of objects in its first ten classes, by name.
        size: the default height and width of an image.
        folders: the possible names of the folder of rendered views.
        uses: the papers'.
    """
    need = Need(folders[0], tuple(folders[1:]), folder=True)
    run = "one image of its own run of the twelve views of each object"
    return DataSet(
        title=title,
        publisher="https://modelnet.cs.princeton.edu as shapes, and as twelve rendered views by "
        "https://github.com/jongchyisu/mvcnn_pytorch (modelnet40_images_new_12x)",
        holds="twelve views of an object, in the first ten classes",
        rows=objects,
        task={"kind": "multiclass", "classes": 10},
        forms=(Form((need,), partial(_read, need.name, objects)),),
        divisions={"views": views(run, (1, 2, 3, 4, 6, 12))},
        uses=uses,
        memory="about 300 MB",
        options={
            "size": (size, "the height and width of an image, in pixels"),
            "samples": (1, _SAMPLES),
        },
    )


def _read(need: str, published: int, files: Files, request: Request) -> Content:
    root = files[need]
    kinds = [folder for folder in folders_in(root) if images_in(folder / TRAIN)][:10]
    if len(kinds) < 10:
        raise InputError(
            Code.FILE_INVALID,
            f"{root}: must hold 10 folders CLASS/train with images (got {len(kinds)}). Render "
            "twelve views of each object into it.",
        )
    rows, objects = Pictured(request.options["size"]), 0
    for label, kind in enumerate(kinds):
        for split in (TRAIN, TEST):
            for name, own in _objects(kind / split).items():
                for sample, chosen in enumerate(_samples(own, request, objects)):
                    rows.add(chosen, label, split, f"{kind.name}/{split}/{name}/{sample}")
                objects += 1
    note = f"The folder has {objects:,} objects (published: {published:,})."
    differs = [note] if objects != published else []
    return rows.content([kind.name for kind in kinds], "The makers' split is kept", [], differs)


def _objects(folder: Path) -> dict[str, list[Path]]:
    """Returns {object: its views in their order}. Raises InputError unless each has twelve."""
    objects: defaultdict[str, dict[int, Path]] = defaultdict(dict)
    for path in images_in(folder):
        parts = _NAME.fullmatch(path.stem)
        if parts is None or int(parts["view"]) in objects[parts["object"]]:
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: is not named OBJECT_VIEW, such as chair_0001_003.png, or is a second "
                "file of this view. Rename or remove it.",
            )
        objects[parts["object"]][int(parts["view"])] = path
    for name, own in objects.items():
        if len(own) != VIEWS:
            raise InputError(
                Code.FILE_INVALID,
                f"{folder}: {name} must have {VIEWS} views (got {len(own)}). Render it again, "
                "or remove it.",
            )
    return {name: [own[view] for view in sorted(own)] for name, own in sorted(objects.items())}


def _samples(own: Sequence[Path], request: Request, place: int) -> list[list[Path]]:
    """Returns different rows of an object: one random view from each party's run of views."""
    k = request.parties
    run = VIEWS // k
    codes = draw_permutation(derive_seed(request.seed, "modelnet", place), run**k)
    chosen = codes[: request.options["samples"]].tolist()
    return [[own[run * part + code // run**part % run] for part in range(k)] for code in chosen]
