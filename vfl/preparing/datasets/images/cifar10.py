"""CIFAR-10 (Krizhevsky 2009): small colour images of things and animals."""

from __future__ import annotations

from functools import partial

from vfl.preparing import recipes
from vfl.preparing.dataset import DataSet, Form, Need, PaperUse
from vfl.preparing.dividing import IMAGE_DIVISIONS
from vfl.preparing.families.cifar_set import binary_version, forms, python_version
from vfl.preparing.formats.jpegs import read_jpegs

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
