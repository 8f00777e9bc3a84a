"""KMNIST (Clanuwat et al. 2018): cursive Japanese characters."""

from __future__ import annotations

from vfl_papers.dataset import DataSet
from vfl_papers.families.idx_set import idx_set

DATASET: DataSet = idx_set(
    "KMNIST",
    "KMNIST",
    "http://codh.rois.ac.jp/kmnist (Kuzushiji-MNIST)",
    "cursive Japanese characters",
    {
        "train-images-idx3-ubyte.gz": (18_165_135, "bdb82020997e1d708af4cf47b453dcf7"),
        "train-labels-idx1-ubyte.gz": (29_497, "e144d726b3acfaa3e44228e80efcd344"),
        "t10k-images-idx3-ubyte.gz": (3_041_136, "5c965bf0a639b31b8f53240b1b52f4d7"),
        "t10k-labels-idx1-ubyte.gz": (5_120, "7320c461ea6c1c855c0b718fb2a4b134"),
    },
    "Tables 4, 5, 7; Figs. 5c, 6c",
)
