"""ModelNet10 and ModelNet40 (Wu et al. 2015): views of objects, rendered as images."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from vfl.preparing.content import TEST, TRAIN, Content
from vfl.preparing.dataset import DataSet, Files, Form, Need, PaperUse, Request
from vfl.preparing.families.pictured import Pictured, views
from vfl.preparing.formats.trees import folders_in, images_in
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import derive_seed, permutation

VIEWS = 12
# airplane_0001_001.png, airplane_0001.1.png, airplane_0001-1.jpg.
_NAME = re.compile(r"(?P<object>.+)[._-](?P<view>\d+)")
_SAMPLES = "how many rows an object gives at most, each with other views of the parties' runs"


def modelnet(
    title: str, objects: int, size: int, folders: Sequence[str], uses: tuple[PaperUse, ...]
) -> DataSet:
    """Returns a ModelNet.

    Args:
        title: its name.
        objects: how many there are in its first ten classes, by name.
        size: the default height and width of an image.
        folders: the names under which its rendered views are found.
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
    kinds = [each for each in folders_in(root) if images_in(each / TRAIN)][:10]
    if len(kinds) < 10:
        text = f"{root}: holds {len(kinds)} folders CLASS/train with images, and 10 are needed"
        raise InputError(Code.FILE_INVALID, f"{text}; render twelve views of each object into it")
    rows, objects = Pictured(request.options["size"]), 0
    for label, kind in enumerate(kinds):
        for split in (TRAIN, TEST):
            for name, own in _objects(kind / split).items():
                for sample, chosen in enumerate(_samples(own, request, objects)):
                    rows.add(chosen, label, split, f"{kind.name}/{split}/{name}/{sample}")
                objects += 1
    told = f"{objects:,} objects were found, and {published:,} are published."
    differs = [told] if objects != published else []
    return rows.content([kind.name for kind in kinds], "The makers' split is kept", [], differs)


def _objects(folder: Path) -> dict[str, list[Path]]:
    """Returns {object: its views in their order}. Raises InputError if one has not twelve."""
    found: defaultdict[str, dict[int, Path]] = defaultdict(dict)
    for path in images_in(folder):
        parts = _NAME.fullmatch(path.stem)
        if parts is None or int(parts["view"]) in found[parts["object"]]:
            text = f"{path}: is not named OBJECT_VIEW, such as chair_0001_003.png, or twice there"
            raise InputError(Code.FILE_INVALID, f"{text}; rename or remove it")
        found[parts["object"]][int(parts["view"])] = path
    for name, own in found.items():
        if len(own) != VIEWS:
            text = f"{folder}: {name} has {len(own)} views, and {VIEWS} are needed"
            raise InputError(Code.FILE_INVALID, f"{text}; render it again, or remove it")
    return {name: [own[view] for view in sorted(own)] for name, own in sorted(found.items())}


def _samples(own: Sequence[Path], request: Request, place: int) -> list[list[Path]]:
    """Returns rows of an object, no two alike: from each party's run of views one at random."""
    k = request.parties
    run = VIEWS // k
    codes = permutation(derive_seed(request.seed, "modelnet", place), run**k)
    chosen = codes[: request.options["samples"]].tolist()
    return [[own[run * part + code // run**part % run] for part in range(k)] for code in chosen]
