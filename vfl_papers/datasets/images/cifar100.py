"""CIFAR-100 (Krizhevsky 2009): small colour images in a hundred classes."""

from __future__ import annotations

from vfl_papers import recipes
from vfl_papers.dataset import DataSet, Need, PaperUse
from vfl_papers.dividing import IMAGE_DIVISIONS
from vfl_papers.families.cifar_set import binary_version, forms, python_version

_PYTHON = python_version(
    Need("cifar-100-python.tar.gz", (), 169_001_437, "eb9058c3a382ffc7106e4002c42a8d85"),
    "cifar-100-python",
    ["train"],
    "test",
    "fine_labels",
)
_BINARY = binary_version(
    Need("cifar-100-binary.tar.gz", (), 168_513_733, "03b5dce01913d631647c71ecec9e9cb8"),
    "cifar-100-binary",
    ["train.bin"],
    "test.bin",
    2,
)

DATASET = DataSet(
    title="CIFAR-100",
    publisher="https://www.cs.toronto.edu/~kriz/cifar.html",
    holds="colour images of 32 × 32 in a hundred classes",
    rows=60_000,
    task={"kind": "multiclass", "classes": 100},
    forms=forms((_PYTHON, _BINARY), ()),
    divisions=IMAGE_DIVISIONS,
    uses=(
        PaperUse(
            "MocoSFL",
            "Table 13; the source of Tables 4, 10, 11",
            "rows",
            5,
            recipes.mocosfl(),
            deal="classes:20",
            silent="The text at hand does not say how many classes of CIFAR-100 a client has "
            "without IID; FedEMA, with which it compares, gives 20 of 100.",
        ),
    ),
    memory="about 450 MB",
)
