"""The recipes of FedOnce's studies: data, parties and models, without phases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks import studies
from benchmarks.studies import Tables

# (folder of data, folder for the study's files) -> recipe.
Make = Callable[[Path, Path], Tables]


def adam(lr: float, weight_decay: float = 0.0) -> Tables:
    return {"kind": "adam", "lr": lr, "weight_decay": weight_decay}


def phishing(parties: int, hidden: list[int], top: list[int]) -> Make:
    def make(data: Path, _own: Path) -> Tables:
        source = {"source": str(data / "phishing.csv.gz"), "id": "id", "label": "y"}
        model = {
            "embedding_size": 3,
            "encoder": {"kind": "mlp", "hidden": hidden},
            "top": {"hidden": top},
        }
        return studies.recipe(
            "fedonce", parties, {"kind": "binary"}, model, {"scheme": "columns", "data": source}
        )

    return make


def uji(parties: int, embedding_size: int, hidden: list[int], top: list[int]) -> Make:
    """Predicts the longitude, scaled to [0, 1]: the paper does not say which of the two coordinates
    it takes.
    """

    def make(data: Path, own: Path) -> Tables:
        path = studies.write_uji(data, own, "LONGITUDE")
        source = {
            "source": str(path),
            "id": "id",
            "label": "LONGITUDE",
            "scale": "minmax",
            "label_scale": "minmax",
        }
        model = {"embedding_size": embedding_size, "encoder": {"kind": "mlp", "hidden": hidden}}
        model["top"] = {"hidden": top}
        return studies.recipe(
            "fedonce", parties, {"kind": "regression"}, model, {"scheme": "columns", "data": source}
        )

    return make


def mnist(data: Path, _own: Path) -> Tables:
    """Omits batch normalisation, as the paper's CNN0 does: with it, learning from noise is worth 4
    points less.
    """
    source = {"source": str(data / "mnist10k.npz"), "label": "labels"}
    encoder = {"kind": "cnn", "channels": [16, 32], "batch_norm": False}
    model = {"embedding_size": 16, "encoder": encoder, "top": {"hidden": [128]}}
    task = {"kind": "multiclass", "classes": 10}
    return studies.recipe("fedonce", 4, task, model, {"scheme": "quadrants", "data": source})


def places(data: Path, own: Path) -> Tables:
    """Uses UJIIndoorLoc's building and floor, 520 columns: enough for 51 parties. Each method has
    its own roster.
    """
    source = {
        "source": str(studies.write_uji(data, own, "place")),
        "id": "id",
        "label": "place",
        "scale": "minmax",
    }
    model = {
        "embedding_size": 3,
        "encoder": {"kind": "mlp", "hidden": [30, 30]},
        "top": {"hidden": [30]},
    }
    task = {"kind": "multiclass", "classes": 13}
    return studies.recipe("fedonce", 2, task, model, {"scheme": "columns", "data": source})
