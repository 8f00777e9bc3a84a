"""MNIST (LeCun et al. 1998): handwritten digits."""

from __future__ import annotations

from vfl_papers.dataset import DataSet
from vfl_papers.families.idx_set import idx_set

DATASET: DataSet = idx_set(
    "MNIST",
    "MNIST",
    "http://yann.lecun.com/exdb/mnist, or its mirrors (Hugging Face: ylecun/mnist)",
    "handwritten digits",
    {
        "train-images-idx3-ubyte.gz": (9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        "train-labels-idx1-ubyte.gz": (28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
        "t10k-images-idx3-ubyte.gz": (1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
        "t10k-labels-idx1-ubyte.gz": (4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
    },
    "Tables 4-7, 10; Figs. 5c, 6c, 7",
    "mnist10k.npz",
)
