"""SVHN (Netzer et al. 2011): house numbers in street views, cropped digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vfl_common.errors import Code, InputError
from vfl_papers import recipes
from vfl_papers.dataset import (
    TEST,
    TRAIN,
    Array,
    Content,
    DataSet,
    Files,
    Form,
    Need,
    PaperUse,
    Request,
)
from vfl_papers.dividing import IMAGE_DIVISIONS
from vfl_papers.families.cifar_set import contents

_TRAIN = Need("train_32x32.mat", (), 182_040_794, "e26dedcc434d2e4c54c9b2d4a06d8373")
_TEST = Need("test_32x32.mat", (), 64_275_384, "eb5a983be6a315427106f1b164d9cef3")


def _read(files: Files, _: Request) -> Content:
    return contents([_images(files[need.name]) for need in (_TRAIN, _TEST)], ())


def _images(path: Path) -> tuple[Array, Array]:
    """Returns images [N, 32, 32, 3] and digits [N] of a file, in which the class 10 is the digit 0.
    Raises InputError.
    """
    # Imported late: it imports torch, which a list of data sets does not need.
    from vfl_party.data.sources.research.mat import read_variables

    images, labels = read_variables(str(path), ("X", "y"))
    fits = images.dtype == np.uint8 and images.shape[1:] == (32, 32, 3)
    if not fits or labels.shape != images.shape[:1]:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: `X` must be bytes [32, 32, 3, N], and `y` the class of each image. "
            "Download it again.",
        )
    return images, np.where(labels == 10, 0, labels).astype(np.int64)


DATASET = DataSet(
    title="SVHN",
    publisher="http://ufldl.stanford.edu/housenumbers (format 2: cropped digits)",
    holds="colour images of 32 × 32 in ten classes",
    rows=99_289,
    task={"kind": "multiclass", "classes": 10},
    forms=(Form((_TRAIN, _TEST), _read, {TRAIN: 73_257, TEST: 26_032}),),
    divisions=IMAGE_DIVISIONS,
    uses=(
        PaperUse(
            "MocoSFL",
            "Table 9, the source data",
            "rows",
            1,
            recipes.mocosfl(),
            silent="The paper mixes the images with 0 to 1 % of CIFAR-10's. It does not say "
            "whether the 531,131 images of `extra_32x32.mat` take part; here they do not.",
        ),
    ),
    memory="about 900 MB",
)
