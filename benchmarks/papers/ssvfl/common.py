"""What the experiments of SS-VFL share: data sets, networks and the settings of section 4."""

from __future__ import annotations

from benchmarks.papers.describe import EVALUATE, At, Data, Line, Tables

# Shares of the training rows that are labelled.
SHARES = (0.01, 0.05, 0.10, 0.25)
SMALL = (
    "the data set that is at hand in place of the paper's, with 4,000 rows, a small network, 20 "
    "epochs alone and 100 with labels"
)
NOTES = (
    "Eq. 2 contrasts what a party sends: without a projector",
    "the paper names no optimizer: SGD with a cosine schedule for contrastive learning, Adam at "
    "0.001 for the others",
    "of a training set, 1, 5, 10 and 25 % are labelled: the same rows for all methods",
)


def _data(
    name: str,
    prepare: str,
    classes: int,
    parties: int,
    encoder: Tables,
    size: int,
    train: int,
    **settings: str,
) -> Data:
    return Data(
        name,
        prepare,
        {
            "kind": "multiclass",
            "classes": classes,
            "metrics": ["top_5"],
        },
        parties,
        "top_5",
        {"embedding_size": size, "encoder": encoder},
        At(None, 1000),
        settings={"train": At(train, 700), **settings},
        options={"paper": "ss-vfl"},
    )


# Table 1's megabytes are 128 numbers a row and party. Fig. 3 shows the accuracy of the top five;
# Table 1 has that of the first for ModelNet10.
_WIDTH = 128
_STEM: Tables = {"small_images": False}
IMAGENET = _data(
    "ImageNet100", "imagenet100", 100, 2, {"kind": "resnet50", **_STEM}, _WIDTH, 126_689
)
MODELNET = _data(
    "ModelNet10",
    "modelnet10",
    10,
    12,
    {"kind": "resnet18", **_STEM},
    _WIDTH,
    3_991,
    target_metric="accuracy",
)
# A mirrored digit is another digit.
DIGITS = Data(
    "MNIST quadrants",
    "mnist",
    {"kind": "multiclass", "classes": 10},
    4,
    "accuracy",
    {"embedding_size": 64, "encoder": {"kind": "cnn", "channels": [16, 32]}},
    4000,
    at=("small",),
    stands_for="ModelNet10",
    options={"divide": "quadrants"},
    settings={"train": 2800, "more": {"augment": {"flip": 0.0}}},
)
DATA = (IMAGENET, MODELNET, DIGITS)


def contrastive(data: Data) -> list[Tables]:
    """Returns LocalCL, which is 200 epochs."""
    return [
        {
            "kind": "contrastive",
            "ssl": "simclr",
            "projector": [],
            "rounds": At(200, 20),
            "batch_size": At(512, 128),
            "optimizer": {
                "kind": "sgd",
                "lr": At(0.06, 0.05),
                "momentum": 0.9,
                "weight_decay": 3e-5,
                "schedule": "cosine",
            },
            **data.settings.get("more", {}),
        }
    ]


def _supervised(kind: str) -> Tables:
    phase: Tables = {
        "kind": kind,
        "batch_size": At(128, 50),
        "optimizer": {"kind": "adam", "lr": 1e-3},
    }
    return phase


def _trained(kind: str, **more: object) -> list[Tables]:
    length = {"epochs": At(500, 100)}
    return [{**_supervised(kind), **length, **more}, EVALUATE]


VFL = Line("VFL", _trained("splitnn"))
SSVFL_I = Line("SS-VFL-I", _trained("head"), pretrain=contrastive)
SSVFL_C = Line("SS-VFL-C", _trained("splitnn"), pretrain_of="SS-VFL-I")
LINES = (VFL, SSVFL_I, SSVFL_C)
