"""CIFAR-10 (Krizhevsky 2009): small colour images of things and animals."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vfl_common.errors import Code, InputError
from vfl_papers import recipes
from vfl_papers.dataset import (
    TEST,
    TRAIN,
    Block,
    Content,
    DataSet,
    Files,
    Form,
    Need,
    PaperUse,
    Request,
    Rows,
    split_into_blocks,
)
from vfl_papers.dividing import IMAGE_DIVISIONS
from vfl_papers.families.cifar_set import binary_version, forms, python_version
from vfl_papers.formats.pictures import PictureDecoder

_COLUMNS = ("id", "jpeg", "label", "part")


def read_jpegs(name: str, size: int, files: Files, _: Request) -> Content:
    """Reads a Parquet table with ``id``, ``jpeg`` (bytes of RGB), ``label`` (0, 1, …) and ``part``
    (train, test). Raises InputError.
    """
    path = files[name]
    try:
        table = pq.read_table(path, columns=list(_COLUMNS))
        ids, jpegs, labels, parts = (table[name].to_pylist() for name in _COLUMNS)
    except (OSError, pa.ArrowException):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: is not a Parquet table with {', '.join(_COLUMNS)}. Write it again.",
        ) from None
    typed = ((jpegs, bytes), (labels, int), (parts, str))
    sound = all(type(value) is kind for column, kind in typed for value in column)
    if not sound or not {TRAIN, TEST}.issuperset(parts):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: a row lacks its jpeg, its label, or its part (train or test). Write it "
            "again.",
        )
    decoder = PictureDecoder(size)

    def blocks(rows: Rows) -> Iterator[Block]:
        for some in split_into_blocks(rows, decoder.bytes):
            names = [f"{path}: row {row + 1}" for row in some]
            yield decoder.of([jpegs[row] for row in some], names)

    texts = np.array([str(id_).encode() for id_ in ids])
    classes, splits = np.array(labels, np.int64), np.array(parts, object)
    return Content(classes, splits, blocks, texts, afterwards=decoder.notes)


_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_PYTHON = python_version(
    Need("cifar-10-python.tar.gz", (), 170_498_071, "c58f30108f718f92721af3b95e74349a"),
    "cifar-10-batches-py",
    [f"data_batch_{number}" for number in range(1, 6)],
    "test_batch",
    "labels",
)
_BINARY = binary_version(
    Need("cifar-10-binary.tar.gz", (), 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530"),
    "cifar-10-batches-bin",
    [f"data_batch_{number}.bin" for number in range(1, 6)],
    "test_batch.bin",
    1,
)
_PARQUET = "cifar10.parquet"
_JPEGS = Form(
    (Need(_PARQUET),),
    partial(read_jpegs, _PARQUET, 32),
    unofficial="a table of JPEG images, whose compression loses detail",
)

DATASET = DataSet(
    title="CIFAR-10",
    publisher="https://www.cs.toronto.edu/~kriz/cifar.html",
    holds="colour images of 32 × 32 in ten classes",
    rows=60_000,
    task={"kind": "multiclass", "classes": 10},
    forms=(*forms((_PYTHON, _BINARY), _CLASSES), _JPEGS),
    divisions=IMAGE_DIVISIONS,
    uses=(
        PaperUse(
            "MocoSFL",
            "Tables 2-12",
            "rows",
            5,
            recipes.mocosfl(),
            silent="The paper's non-IID division, two classes a client, is `deal = classes:2`. "
            "Here the test images lie at the clients, who send their features to be scored; in "
            "the paper they lie at the server.",
        ),
        PaperUse(
            "FedOnce",
            "Fig. 11",
            "quadrants",
            4,
            recipes.fedonce(
                recipes.CNN0,
                [128],
                (1e-4, 1e-5, 128, 100),
                (1e-3, 1e-5, 128, 200),
                d=16,
                f=3,
            ),
            silent="The paper does not give the numbers of this experiment: they are those of "
            "MNIST.",
        ),
    ),
    memory="about 450 MB",
)
