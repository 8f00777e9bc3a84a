"""What FedOnce's tables share: data sets with their networks (Tables 1 and 2) and the settings of
its phases (Table 5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.papers.describe import (
    EVALUATE,
    SCALES,
    At,
    Data,
    Line,
    Scale,
    Tables,
    resolved,
)

TABLES = "3,000 rows, a tenth of the epochs or so, and Adam at 0.001"
HOST = (
    "the host's own columns pass an encoder of d outputs, as in the released code; the paper's text "
    "feeds them to the host model as they are"
)
UNSAID = (
    "the paper does not say how SplitNN, Solo and Combine are trained: here as FedOnce's host model,"
    " with Adam at 0.001; Solo and Combine have an embedding of 30 numbers, since nobody sends it"
)


def adam(lr: float, weight_decay: float = 0.0) -> Tables:
    """Returns the settings of Adam."""
    return {"kind": "adam", "lr": lr, "weight_decay": weight_decay}


def of_table5(
    guest: tuple[float, float, int, int],
    host: tuple[float, float, int, int],
    every: int = 1,
    small: tuple[int, int] = (15, 40),
    rows: int = 70_000,
    official_test: float | None = None,
) -> Tables:
    """Returns a data set's phases. ``guest``, ``host``: learning rate, weight decay, batch size and
    epochs of Table 5; ``every``: its f; ``small``: the epochs of the scale ``small``; ``rows``: of
    the whole set; ``official_test``: the share of its rows that are official test rows, if any.
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
    whole: Tables = {"rows": rows, "local": local, "head": head, "split": split}
    return whole | ({} if official_test is None else {"official_test": official_test})


def _fc(hidden: Sequence[int], top: Sequence[int], size: int = 3) -> Tables:
    return {
        "embedding_size": size,
        "encoder": {"kind": "mlp", "hidden": [*hidden]},
        "top": {"hidden": [*top]},
    }


_CNN0: Tables = {
    "embedding_size": 16,
    "encoder": {"kind": "cnn0", "hidden": [128]},
    "top": {"hidden": [128]},
}
BINARY: Tables = {"kind": "binary"}
TEN: Tables = {"kind": "multiclass", "classes": 10}
REGRESSION: Tables = {"kind": "regression"}
_SCALED: Tables = {"scale": "minmax", "label_scale": "minmax"}


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
        # The paper's 9:1. Nothing here is chosen by validation rows.
        shares=(0.0, 0.1),
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
    of_table5((1e-4, 1e-5, 100, 100), (1e-4, 1e-4, 100, 100), rows=7000, official_test=1 / 7),
    whole=_COLUMNS,
    untrained=52.0,
)
COVTYPE = _data(
    "covtype",
    "covtype",
    BINARY,
    10,
    "accuracy",
    _fc([200, 100, 100], [30, 30]),
    3000,
    of_table5((1e-3, 1e-5, 100, 30), (1e-3, 1e-3, 100, 100), rows=581012),
    whole=_COLUMNS,
    untrained=53.0,
)
PHISHING = _data(
    "phishing",
    "phishing",
    BINARY,
    10,
    "accuracy",
    _fc([30, 30], [30]),
    3000,
    of_table5((1e-4, 1e-5, 100, 100), (1e-4, 1e-4, 100, 300), rows=11055),
    whole=_COLUMNS,
    untrained=57.0,
)
UJI = _data(
    "UJIIndoorLoc",
    "ujiindoorloc",
    REGRESSION,
    10,
    "rmse_scaled",
    _fc([50, 50, 50, 30], [30, 10]),
    3000,
    of_table5((3e-4, 1e-4, 100, 500), (1e-4, 1e-4, 100, 600), rows=21048) | {"columns": 520},
    reading=_SCALED,
    whole=_COLUMNS,
    untrained=0.30,
)
SUPERCONDUCT = _data(
    "Superconduct",
    "superconduct",
    REGRESSION,
    10,
    "rmse_scaled",
    _fc([30, 30], [30, 10]),
    3000,
    of_table5((3e-4, 1e-4, 100, 500), (3e-4, 1e-4, 128, 600), rows=21263) | {"columns": 81},
    reading=_SCALED,
    whole=_COLUMNS,
    untrained=0.18,
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
        of_table5(
            (1e-4, 1e-5, 128, 100), (1e-3, 1e-5, 128, 200), 3, small=(6, 15), official_test=1 / 7
        ),
        whole=_STRIP,
        options={"divide": "quadrants"},
        untrained=15.0,
    )


MNIST = _images("MNIST", "mnist")
KMNIST = _images("KMNIST", "kmnist")
FASHION = _images("Fashion-MNIST", "fashion_mnist")
NUSWIDE = _data(
    "NUS-WIDE",
    "nuswide_sky",
    BINARY,
    5,
    "accuracy",
    _fc([60], [50], 8),
    3000,
    of_table5((3e-4, 1e-5, 128, 50), (7e-5, 1e-5, 128, 50), rows=269_648, official_test=0.4),
)


def _ncf(size: int, hidden: Sequence[int]) -> Tables:
    """Returns NCF: an embedding of each category, then fully connected layers."""
    return {
        "embedding_size": size,
        "encoder": {"kind": "tabular", "hidden": [*hidden]},
        "top": {"hidden": [10]},
    }


def _of_movielens(host: tuple[float, float, int, int]) -> Tables:
    return of_table5((1e-4, 1e-5, 64, 30), host, rows=1000209)


MOVIELENS = _data(
    "MovieLens",
    "movielens",
    REGRESSION,
    2,
    "rmse",
    _ncf(3, [32, 16]),
    3000,
    _of_movielens((1e-4, 2e-4, 64, 40)),
    # The paper counts parties from 0.
    of_host={2: {"model": _ncf(48, [128]), "settings": _of_movielens((5e-4, 1e-5, 64, 100))}},
)
COLUMNS = (GISETTE, COVTYPE, PHISHING)
NUMBERS = (UJI, SUPERCONDUCT)
PICTURES = (MNIST, KMNIST, FASHION)
FEDERATED = (NUSWIDE, MOVIELENS)
BY_ACCURACY = (*COLUMNS, *PICTURES, NUSWIDE)
ALL = (*COLUMNS, *NUMBERS, *PICTURES, *FEDERATED)


def local(data: Data) -> list[Tables]:
    """Returns the guests' learning from noise as targets."""
    return [data.settings["local"]]


def pca(_data: Data) -> list[Tables]:
    """Returns principal components in place of noise as targets."""
    return [{"kind": "fedonce", "objective": "pca"}]


def one_upload(data: Data) -> list[Tables]:
    """Returns the one upload and the training of the host's model."""
    return [data.settings["head"], EVALUATE]


def then_split(data: Data) -> list[Tables]:
    """Returns multi-round FedOnce: one upload, then split training."""
    return [data.settings["head"], data.settings["split"], EVALUATE]


def split(data: Data) -> list[Tables]:
    """Returns split training."""
    return [data.settings["split"], EVALUATE]


def count_rows(data: Data, scale: Scale) -> int:
    """Returns how many rows a data set has at a scale."""
    rows: int = resolved(data.rows, scale) or data.settings["rows"]
    return rows


def upload_bytes(data: Data, scale: Scale, folds: At | None) -> int:
    """Returns the payload of FedOnce's one upload, 4 n d (k - 1). ``folds``: of a
    cross-validation, of which one is for testing, in place of official test rows.
    """
    _, test = data.shares
    if folds is not None:
        test = 1 / resolved(folds, scale)
    elif "official_test" in data.settings:
        test = data.settings["official_test"]
    train = 1 - test
    upload: int = (
        4
        * round(train * count_rows(data, scale))
        * data.model["embedding_size"]
        * (data.parties - 1)
    )
    return upload


def split_within(
    times: float, *, after: bool = False, folds: At | None = None
) -> Callable[[Data], list[Tables]]:
    """Returns split training that ends at so many times the bytes of FedOnce's upload; ``after``
    it, the upload is one of them.
    """

    def of(data: Data) -> list[Tables]:
        paper, small = (int(upload_bytes(data, s, folds) * (times - after)) for s in SCALES)
        most = At(paper, small)
        epochs = 1 + int(times)
        phase = {**data.settings["split"], "max_bytes": most, "epochs": epochs}
        return [*([data.settings["head"]] if after else []), phase, EVALUATE]

    return of


def linear(data: Data) -> list[Tables]:
    """Returns the training of a linear model, long enough at the scale ``small`` to converge.

    A regression has scikit-learn's default ridge penalty, |w|² beside the sum of squared errors.
    """
    epochs = At(data.settings["head"]["epochs"].paper, 400)
    rate: Any = At(1e-3, 1e-2)
    penalty: Any = 0.0
    if data.task["kind"] == "regression":
        train = 1 - data.shares[1]
        penalty = At(*(2 / (train * count_rows(data, scale)) for scale in SCALES))
    optimizer = adam(rate, penalty)
    return [{**data.settings["split"], "epochs": epochs, "optimizer": optimizer}, EVALUATE]


def one_layer(data: Data) -> Tables:
    """Returns the model of a linear one: a single layer on the columns, which a ridge penalty
    needs, or two without an activation.
    """
    top: Tables = {"model.top": {"hidden": []}}
    if (columns := data.settings.get("columns")) is None:
        return top | {"model.encoder": {"kind": "mlp", "hidden": []}}
    return top | {"model.encoder": {"kind": "raw"}, "model.embedding_size": columns}


BOOSTED_PHASE: Tables = {
    "kind": "secureboost",
    "encryption": "none",
    "bins": 32,
    "depth": 6,
    "trees": At(300, 20),
    "learning_rate": At(0.1, 0.3),
}
BOOSTED = Line(
    "SecureBoost",
    [BOOSTED_PHASE],
    on=("gisette", "covtype", "phishing", "UJIIndoorLoc", "Superconduct", "NUS-WIDE", "MovieLens"),
)
LINEAR = Line("Linear-Combine", linear, combined=True, changes=one_layer)
WIDE: Tables = {"model.embedding_size": 30}
L0 = Line("FedOnce-L0", one_upload, pretrain=local)
PCA = Line("FedOnce-PCA", one_upload, pretrain=pca)
MULTI = Line("FedOnce-L0, more rounds", then_split, pretrain_of="FedOnce-L0")
SPLITNN = Line("SplitNN", split)
SOLO = Line("Solo", split, alone=True, changes=WIDE)
COMBINE = Line("Combine", split, combined=True, changes=WIDE)
