"""What FedHSSL's tables share: data sets with their networks (Tables III and VIII), the settings of
pretraining (appendix B) and the lines.
"""

from __future__ import annotations

from typing import Any

from benchmarks.papers.describe import EVALUATE, At, Column, Data, Line, Tables

NAMES = {"simsiam": "SimSiam", "byol": "BYOL", "moco": "MoCo"}
LABELS = (200, 400, 600, 800, 1000)
ALIGNED: Tables = {"rows.aligned": 0.4}
TWENTY: Tables = {"rows.aligned": 0.2}
SMALL = (
    "2,000 rows of the data sets at hand, a small network, 4 rounds, batches of 128, 150 steps of "
    "fine-tuning"
)
RATE = (
    "the paper does not say the learning rate of pretraining: it is 0.05 · B / 256, times 0.5 / "
    "(0.5 + γ) with guidance, as in the released code"
)
NOTES = (
    RATE,
    "the paper does not say how long fine-tuning is: here 300 steps",
    "the learning rate of fine-tuning is chosen by validation rows of all seeds; the paper does not"
    " say by which rows",
)


def sgd(lr: float, **more: Any) -> Tables:
    """Returns the settings of SGD with momentum."""
    return {"kind": "sgd", "lr": lr, "momentum": 0.9} | more


def _mlp(kind: str) -> Tables:
    """Returns two fully connected layers, the last of which FedHSSL shares."""
    return {"embedding_size": 512, "encoder": {"kind": kind, "hidden": [512], "batch_norm": True}}


# Without a last layer: the paper averages the top three blocks of the network (Table III).
_RESNET: Tables = {"embedding_size": 512, "encoder": {"kind": "resnet18", "last_layer": False}}
NUSWIDE = Data(
    "NUSWIDE",
    "nuswide",
    {"kind": "multiclass", "classes": 10},
    2,
    "accuracy",
    _mlp("mlp"),
    At(None, 2000),
    settings={"rounds": At(10, 4), "batch": 512},
)
AVAZU = Data(
    "Avazu",
    "avazu",
    {"kind": "binary"},
    2,
    "auc",
    {"embedding_size": 512, "encoder": {"kind": "tabular", "hidden": [512], "category_size": 32}},
    At(120_000, 2000),
    settings={"rounds": At(40, 4), "batch": 512},
)
BHI = Data(
    "BHI",
    "bhi",
    {"kind": "binary"},
    2,
    "f1",
    _RESNET,
    At(None, 1000),
    settings={"rounds": At(40, 2), "batch": 128},
)
MODELNET = Data(
    "Modelnet",
    # The first 10 of the 40 classes, with several rows of an object (appendix A).
    "modelnet40",
    {"kind": "multiclass", "classes": 10},
    4,
    "accuracy",
    _RESNET,
    At(None, 1000),
    options={"samples": 7},
    settings={"rounds": At(40, 2), "batch": 128},
)
PAPER = (NUSWIDE, AVAZU, BHI, MODELNET)
# A mirrored digit is another digit.
DIGITS = Data(
    "MNIST quadrants",
    "mnist",
    {"kind": "multiclass", "classes": 10},
    4,
    "accuracy",
    {
        "embedding_size": 64,
        "encoder": {"kind": "cnn", "channels": [16, 32], "shared": "blocks"},
    },
    2000,
    at=("small",),
    stands_for="Modelnet",
    options={"divide": "quadrants"},
    settings={"rounds": 4, "batch": 50, "more": {"augment": {"flip": 0.0}, "queue": 1024}},
)
SITES = Data(
    "phishing",
    "phishing",
    {"kind": "binary"},
    2,
    "auc",
    {"embedding_size": 64, "encoder": {"kind": "mlp", "hidden": [128], "batch_norm": True}},
    2000,
    at=("small",),
    stands_for="Avazu",
    settings={"rounds": 4, "batch": 50, "more": {"queue": 1024}},
)
DATA = (*PAPER, DIGITS, SITES)


def fine(data: Data) -> list[Tables]:
    """Returns fine-tuning, which is split training."""
    phase: Tables = {"kind": "splitnn", "steps": At(300, 150), "validate_every": 20}
    return [phase | {"batch_size": data.settings["batch"], "optimizer": sgd(0.01)}, EVALUATE]


_BATCH = At(512, 128)


def schedule(gamma: float) -> Tables:
    """Returns the optimizer of pretraining for a guidance weight; see ``RATE``."""
    rate: Any = At(0.05 * _BATCH.paper / 256 * 0.5 / (0.5 + gamma), 0.05)
    return sgd(rate, weight_decay=3e-5, schedule="cosine")


def pretrained(ssl: str, **switches: Any) -> Any:
    """Returns pretraining by FedHSSL or one of its sub-procedures, for a data set."""
    guided_ = switches.get("cross", True) and switches.get("local", True)

    def of(data: Data) -> list[Tables]:
        phase: Tables = {
            "kind": "fedhssl",
            "ssl": ssl,
            "rounds": data.settings["rounds"],
            "batch_size": _BATCH,
            "optimizer": schedule(0.5 if guided_ else 0.0),
            **data.settings.get("more", {}),
            **switches,
        }
        if ssl != "moco":
            phase.pop("queue", None)
        return [phase]

    return of


RATES = At((0.005, 0.01, 0.03), (0.01,))
LOCAL: Tables = {"cross": False, "aggregate": False}
SPLITNN = Line("FedSplitNN", rates=RATES)


def local(ssl: str, **more: Any) -> Line:
    """Returns the line of self-supervised learning at each party alone."""
    return Line(f"FedLocal{NAMES[ssl]}", pretrain=pretrained(ssl, **LOCAL), rates=RATES, **more)


def cross(ssl: str, **more: Any) -> Line:
    """Returns the line of the cross-party step alone."""
    switches = {"local": False, "aggregate": False}
    return Line(f"FedCSSL-{NAMES[ssl]}", pretrain=pretrained(ssl, **switches), rates=RATES, **more)


def guided(ssl: str, **more: Any) -> Line:
    """Returns the line of the cross-party step and guided local learning, without aggregation."""
    return Line(
        f"FedGSSL-{NAMES[ssl]}", pretrain=pretrained(ssl, aggregate=False), rates=RATES, **more
    )


def hybrid(ssl: str, **more: Any) -> Line:
    """Returns the line of FedHSSL with all of its steps."""
    return Line(f"FedHSSL-{NAMES[ssl]}", pretrain=pretrained(ssl), rates=RATES, **more)


def starred(line: Line) -> Line:
    """Returns the line that fine-tunes the local encoders alone, of a line's pretraining."""
    return Line(f"{line.name}*", pretrain_of=line.name, tower="local", rates=RATES, at=line.at)


GBDT = Line("LGB", [{"kind": "gbdt", "trees": 200, "early_stopping": 20}], combined=True)
LOGISTIC = Line(
    "LR", combined=True, changes={"model.encoder": {"kind": "mlp", "hidden": []}}, rates=RATES
)
CVT = Line(
    "FedCVT",
    lambda data: [
        {
            "kind": "fedcvt",
            "steps": 300,
            "batch_size": data.settings["batch"],
            "unlabelled_batch_size": At(128, 64),
            "own_batch_size": 128,
            "optimizer": {"kind": "adam", "lr": 0.005},
        },
        EVALUATE,
    ],
    rates=At((0.001, 0.005, 0.01), (0.005,)),
)


def of_labels(aligned: Tables, small: tuple[int, ...] = (200, 400)) -> tuple[Column, ...]:
    """Returns a column for each number of labels."""
    return tuple(
        Column(
            str(each),
            labels=each,
            changes=aligned,
            at=("paper", "small") if each in small else ("paper",),
        )
        for each in LABELS
    )
