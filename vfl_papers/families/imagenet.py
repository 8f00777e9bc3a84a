"""ImageNet (Deng et al. 2009): folders of photographs of mixed sizes; some classes are drawn."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from vfl_common.errors import Code, InputError
from vfl_papers.dataset import TEST, TRAIN, Content, DataSet, Files, Form, Need, PaperUse, Request
from vfl_papers.dividing import IMAGE_DIVISIONS
from vfl_papers.families.pictured import Pictured
from vfl_papers.formats.trees import folders_in, images_in
from vfl_party.base.seeds import derive_seed, draw_permutation

# The sizes are those of the archives.
_TRAIN = Need("train", bytes=147_897_477_120, folder=True)
_VAL = Need("val", ("validation",), bytes=6_744_924_160, folder=True)
# Kaggle's list of the classes of validation images, which are in one folder there.
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
    names, listed = _choose(files[_TRAIN.name], classes, request), _read_list(files)
    rows = Pictured(request.options["size"], single=True)
    for label, name in enumerate(names):
        for split, root in ((TRAIN, files[_TRAIN.name]), (TEST, files[_VAL.name])):
            own = images_in(root / name) or (listed.get(name, []) if split == TEST else [])
            if not own:
                raise InputError(
                    Code.FILE_INVALID,
                    f"{root / name}: holds no images, but each class needs {split} rows. Unpack "
                    "the archives of ImageNet.",
                )
            for path in own:
                rows.add([path], label, split, f"{split}/{name}/{path.name}")
    return rows.content(names, _SPLIT, [], [])


def _choose(root: Path, classes: int, request: Request) -> list[str]:
    """Returns the names of the classes, sorted: as given, or drawn. Raises InputError."""
    known = [folder.name for folder in folders_in(root)]
    names = {name.strip() for name in str(request.options["classes"]).split(",") if name.strip()}
    unknown = sorted(names.difference(known))
    if unknown:
        raise InputError(
            Code.CONFIG_INVALID,
            f"classes: there is no folder {root / unknown[0]}. Correct the name.",
        )
    if names and len(names) != classes:
        raise InputError(
            Code.CONFIG_INVALID,
            f"classes: must be {classes} names (got {len(names)}). Name {classes}, or none to "
            "draw them.",
        )
    if len(known) < classes:
        raise InputError(
            Code.FILE_INVALID,
            f"{root}: must hold {classes} folders (got {len(known)}). Unpack the archives of "
            "ImageNet.",
        )
    order = draw_permutation(derive_seed(request.seed, "imagenet"), len(known))
    return sorted(names or [known[at] for at in order[:classes]])


def _read_list(files: Files) -> Mapping[str, list[Path]]:
    """Returns {class: validation images} of Kaggle's list; empty without it. Raises InputError."""
    images: dict[str, list[Path]] = {}
    if _LIST.name not in files:
        return images
    path, root = files[_LIST.name], files[_VAL.name]
    there = {image.stem: image for image in images_in(root)}
    try:
        with path.open(newline="") as file:
            for line in csv.DictReader(file):
                image = there.get(line["ImageId"])
                if image is not None:
                    images.setdefault(line["PredictionString"].split()[0], []).append(image)
    except (OSError, ValueError, KeyError, IndexError, AttributeError, csv.Error):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: is not a list with ImageId and PredictionString. Download it again.",
        ) from None
    return images
