"""What FedOnce's tables share: data sets with their networks (Tables 1 and 2) and the settings of
its phases (Table 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.papers.describe import EVALUATE, At, Data, Line, Tables

TABLES = "The scale `small` has fewer rows and epochs, and Adam at 0.001."
UNSAID = (
    "the paper does not say how SplitNN, Solo and Combine are trained: here as FedOnce's host model,"
    " with Adam at 0.001; Solo and Combine have an embedding of 30 numbers, since nobody sends it"
)


def adam(lr: float, weight_decay: float = 0.0) -> Tables:
    return {"kind": "adam", "lr": lr, "weight_decay": weight_decay}


def of_table5(
    guest: tuple[float, float, int, int],
    host: tuple[float, float, int, int],
    every: int = 1,
    small: tuple[int, int] = (15, 40),
) -> Tables:
    """Returns a data set's phases. ``guest``, ``host``: learning rate, weight decay, batch size and
    epochs of Table 5; ``every``: its f; ``small``: the epochs of the scale ``small``.
    """
    local: Tables = {
        "kind": "fedonce",
        "epochs": At(guest[3], small[0]),
        "batch_size": guest[2],
        "optimizer": adam(At(guest[0], 1e-3), guest[1]),  # type: ignore[arg-type]
    }
    if every > 1:
        local["match_every"] = every
    head: Tables = {
        "kind": "head",
        "own_encoder": "trained",
        "epochs": At(host[3], small[1]),
        "batch_size": host[2],
        "optimizer": adam(At(host[0], 1e-3), host[1]),  # type: ignore[arg-type]
    }
    split: Tables = {
        "kind": "splitnn",
        "epochs": At(host[3], small[1] // 2),
        "batch_size": host[2],
        "optimizer": adam(1e-3, host[1]),
    }
    return {"local": local, "head": head, "split": split}


def _fc(hidden: Sequence[int], top: Sequence[int], size: int = 3) -> Tables:
    return {
        "embedding_size": size,
        "encoder": {"kind": "mlp", "hidden": [*hidden]},
        "top": {"hidden": [*top]},
    }


# CNN0 has no batch normalisation.
_CNN0: Tables = {
    "embedding_size": 16,
    "encoder": At({"kind": "cnn0"}, {"kind": "cnn", "channels": [16, 32], "batch_norm": False}),
    "top": {"hidden": [128]},
}
BINARY: Tables = {"kind": "binary"}
TEN: Tables = {"kind": "multiclass", "classes": 10}
REGRESSION: Tables = {"kind": "regression"}
_SCALED: Tables = {"label_scale": "minmax"}


# One party has all columns, or all of an image.
_COLUMNS: Tables = {"divide": "columns"}
_STRIP: Tables = {"divide": "strips"}


def _data(
    name: str,
    prepare: str,
    task: Tables,
    parties: int,
    metric: str,
    model: Tables,
    rows: int,
    settings: Tables,
    **more: Any,
) -> Data:
    return Data(
        name,
        prepare,
        task,
        parties,
        metric,
        model,
        At(None, rows),
        shares=(0.1, 0.1),
        settings=settings,
        **more,
    )


GISETTE = _data(
    "gisette",
    "gisette",
    BINARY,
    10,
    "accuracy",
    _fc([100, 100, 50], [30, 30]),
    3000,
    of_table5((1e-4, 1e-5, 100, 100), (1e-4, 1e-4, 100, 100)),
    whole=_COLUMNS,
)
COVTYPE = _data(
    "covtype",
    "covtype",
    BINARY,
    10,
    "accuracy",
    _fc([200, 100, 100], [30, 30]),
    3000,
    of_table5((1e-3, 1e-5, 100, 30), (1e-3, 1e-3, 100, 100)),
    whole=_COLUMNS,
)
PHISHING = _data(
    "phishing",
    "phishing",
    BINARY,
    10,
    "accuracy",
    _fc([30, 30], [30]),
    3000,
    of_table5((1e-4, 1e-5, 100, 100), (1e-4, 1e-4, 100, 300)),
    whole=_COLUMNS,
)
UJI = _data(
    "UJIIndoorLoc",
    "ujiindoorloc",
    REGRESSION,
    10,
    "rmse_scaled",
    _fc([50, 50, 50, 30], [30, 10]),
    3000,
    of_table5((3e-4, 1e-4, 100, 500), (1e-4, 1e-4, 100, 600)),
    whole=_COLUMNS,
)
SUPERCONDUCT = _data(
    "Superconduct",
    "superconduct",
    REGRESSION,
    10,
    "rmse_scaled",
    _fc([30, 30], [30, 10]),
    3000,
    of_table5((3e-4, 1e-4, 100, 500), (3e-4, 1e-4, 128, 600)),
    whole=_COLUMNS,
)


def _images(name: str, prepare: str) -> Data:
    return _data(
        name,
        prepare,
        TEN,
        4,
        "accuracy",
        _CNN0,
        3000,
        of_table5((1e-4, 1e-5, 128, 100), (1e-3, 1e-5, 128, 200), 3, small=(6, 15)),
        whole=_STRIP,
        options={"divide": "quadrants"},
    )


MNIST = _images("MNIST", "mnist")
KMNIST = _images("KMNIST", "kmnist")
FASHION = _images("Fashion-MNIST", "fashion_mnist")
NUSWIDE = _data(
    "NUS-WIDE",
    "nuswide",
    BINARY,
    5,
    "accuracy",
    _fc([60], [50], 8),
    3000,
    of_table5((3e-4, 1e-5, 128, 50), (7e-5, 1e-5, 128, 50)),
    options={"paper": "fedonce"},
)
MOVIELENS = _data(
    "MovieLens",
    "movielens",
    REGRESSION,
    2,
    "rmse",
    {
        "embedding_size": 3,
        "encoder": At({"kind": "ncf", "hidden": [32, 16]}, {"kind": "tabular", "hidden": [32, 16]}),
        "top": {"hidden": [10]},
    },
    3000,
    of_table5((1e-4, 1e-5, 64, 30), (1e-4, 2e-4, 64, 40)),
)
COLUMNS = (GISETTE, COVTYPE, PHISHING)
NUMBERS = (UJI, SUPERCONDUCT)
PICTURES = (MNIST, KMNIST, FASHION)
FEDERATED = (NUSWIDE, MOVIELENS)
ALL = (*COLUMNS, *NUMBERS, *PICTURES, *FEDERATED)


def local(data: Data) -> list[Tables]:
    """Returns the guests' learning from noise as targets."""
    return [data.settings["local"]]


def pca(_data: Data) -> list[Tables]:
    return [{"kind": "fedonce", "objective": "pca"}]


def one_upload(data: Data) -> list[Tables]:
    """Returns the one upload and the training of the host's model."""
    return [data.settings["head"], EVALUATE]


def then_split(data: Data) -> list[Tables]:
    """Returns multi-round FedOnce: one upload, then split training."""
    return [data.settings["head"], data.settings["split"], EVALUATE]


def split(data: Data) -> list[Tables]:
    return [data.settings["split"], EVALUATE]


WIDE: Tables = {"model.embedding_size": 30}
L0 = Line("FedOnce-L0", one_upload, pretrain=local)
PCA = Line("FedOnce-PCA", one_upload, pretrain=pca)
MULTI = Line("FedOnce-L0, more rounds", then_split, pretrain_of="FedOnce-L0")
SPLITNN = Line("SplitNN", split)
SOLO = Line("Solo", split, alone=True, changes=WIDE)
COMBINE = Line("Combine", split, combined=True, changes=WIDE)
