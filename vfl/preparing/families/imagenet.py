"""ImageNet (Deng et al. 2009): folders of photographs of mixed sizes; some classes are drawn."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from vfl.preparing.content import TEST, TRAIN, Content
from vfl.preparing.dataset import DataSet, Files, Form, Need, PaperUse, Request
from vfl.preparing.dividing import IMAGE_DIVISIONS
from vfl.preparing.families.pictured import Pictured
from vfl.preparing.formats.trees import folders_in, images_in
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import derive_seed, permutation

# The sizes are those of the archives.
_TRAIN = Need("train", bytes=147_897_477_120, folder=True)
_VAL = Need("val", ("validation",), bytes=6_744_924_160, folder=True)
# Kaggle's list of the classes of validation images, which there lie in one folder.
_LIST = Need("LOC_val_solution.csv", optional=True)
_SPLIT = "The validation images are for testing, because the test images have no labels"


def imagenet(title: str, classes: int, rows: int, uses: tuple[PaperUse, ...]) -> DataSet:
    """Returns a data set of so many classes of ImageNet, which have about ``rows`` images."""
    return DataSet(
        title=title,
        publisher="https://image-net.org (ILSVRC 2012, a folder for each class, as n01440764)",
        holds=f"photographs of mixed sizes, in {classes} of 1,000 classes",
        rows=rows,
        task={"kind": "multiclass", "classes": classes},
        forms=(Form((_TRAIN, _VAL, _LIST), partial(_read, classes)),),
        divisions=IMAGE_DIVISIONS,
        uses=uses,
        memory="about 300 MB",
        options={
            "size": (224, "the height and width of an image, in pixels"),
            "classes": ("", "the folders of the classes, with commas between; drawn if empty"),
        },
    )


def _read(classes: int, files: Files, request: Request) -> Content:
    names, listed = _chosen(files[_TRAIN.name], classes, request), _listed(files)
    rows = Pictured(request.options["size"], single=True)
    for label, name in enumerate(names):
        for split, root in ((TRAIN, files[_TRAIN.name]), (TEST, files[_VAL.name])):
            own = images_in(root / name) or (listed.get(name, []) if split == TEST else [])
            if not own:
                text = f"{root / name}: holds no images, and {split} rows of each class are needed"
                raise InputError(Code.FILE_INVALID, f"{text}; unpack the archives of ImageNet")
            for path in own:
                rows.add([path], label, split, f"{split}/{name}/{path.name}")
    return rows.content(names, _SPLIT, [], [])


def _chosen(root: Path, classes: int, request: Request) -> list[str]:
    """Returns the names of the classes, by name: as given, or drawn. Raises InputError."""
    known = [each.name for each in folders_in(root)]
    given = {each.strip() for each in str(request.options["classes"]).split(",") if each.strip()}
    lost = sorted(given.difference(known))
    if lost:
        text = f"classes: there is no folder {root / lost[0]}; correct the name"
        raise InputError(Code.CONFIG_INVALID, text)
    if given and len(given) != classes:
        text = f"classes: {len(given)} are named; name {classes}, or none to have them drawn"
        raise InputError(Code.CONFIG_INVALID, text)
    if len(known) < classes:
        text = f"{root}: holds {len(known)} folders, and {classes} classes are needed"
        raise InputError(Code.FILE_INVALID, f"{text}; unpack the archives of ImageNet")
    order = permutation(derive_seed(request.seed, "imagenet"), len(known))
    return sorted(given or [known[at] for at in order[:classes]])


def _listed(files: Files) -> Mapping[str, list[Path]]:
    """Returns {class: validation images} of Kaggle's list; none without it. Raises InputError."""
    found: dict[str, list[Path]] = {}
    if _LIST.name not in files:
        return found
    path, root = files[_LIST.name], files[_VAL.name]
    there = {each.stem: each for each in images_in(root)}
    try:
        with path.open(newline="") as file:
            for line in csv.DictReader(file):
                image = there.get(line["ImageId"])
                if image is not None:
                    found.setdefault(line["PredictionString"].split()[0], []).append(image)
    except (OSError, ValueError, KeyError, IndexError, AttributeError, csv.Error):
        text = f"{path}: is no list with ImageId and PredictionString; get it from its makers again"
        raise InputError(Code.FILE_INVALID, text) from None
    return found
