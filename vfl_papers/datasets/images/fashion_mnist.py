"""Fashion-MNIST (Xiao et al. 2017): pieces of clothing."""

from __future__ import annotations

from vfl_papers.dataset import DataSet
from vfl_papers.families.idx_set import idx_set

DATASET: DataSet = idx_set(
    "Fashion-MNIST",
    "FashionMNIST",
    "https://github.com/zalandoresearch/fashion-mnist",
    "pieces of clothing",
    {
        "train-images-idx3-ubyte.gz": (26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        "train-labels-idx1-ubyte.gz": (29_515, "25c81989df183df01b3e8a0aad5dffbe"),
        "t10k-images-idx3-ubyte.gz": (4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
        "t10k-labels-idx1-ubyte.gz": (5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
    },
    "Tables 4, 5; Figs. 5c, 6c",
)
