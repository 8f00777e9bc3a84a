"""Reads data sets by name: those bundled with scikit-learn, and those of torchvision."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vfl_common.config.data import DataSettings
from vfl_party.data import checks
from vfl_party.data.choice import choose_features, without_row
from vfl_party.data.collect import columns_of
from vfl_party.data.columns import Rows
from vfl_party.data.sources.arrays import channels_first, row_ids

SKLEARN = ("breast_cancer", "diabetes", "digits", "iris", "wine")
# The name of every set's label, and of torchvision's own split.
TARGET, PART = "target", "part"


def read_sklearn(settings: DataSettings, with_label: bool) -> Rows:
    """Reads one of scikit-learn's bundled sets; ``digits`` is images of 1 x 8 x 8, from 0 to 1.
    Raises InputError.
    """
    name = settings.source.removeprefix("sklearn:")
    if name not in SKLEARN:
        raise checks.unusable(
            settings.source,
            f"is not a bundled set of scikit-learn. Choose one of {', '.join(SKLEARN)}.",
        )
    _check_roles(settings)
    bunch = _bunch(name)
    keep = slice(0, settings.first)
    ids = [row_ids(len(bunch.target))[keep]]
    labels = bunch.target[keep].astype(np.float64) if with_label else None
    if name == "digits":
        checks.refuse_column_settings(
            settings.source, settings, ("columns", "drop", "numeric", "categorical")
        )
        return Rows(ids, labels, (bunch.images[keep, None] / 16.0).astype(np.float32))
    features = {str(key): bunch.data[keep, j] for j, key in enumerate(bunch.feature_names)}
    chosen = choose_features(settings.source, list(features), settings)
    return Rows(ids, labels, columns_of(pa.table({key: features[key] for key in chosen}), settings))


@lru_cache(maxsize=2)
def _bunch(name: str) -> Any:
    """Reads a set once for all parties and runs of a process; it must not be modified."""
    from sklearn import datasets

    bunch = getattr(datasets, f"load_{name}")()
    for value in bunch.values():
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    return bunch


def read_torchvision(settings: DataSettings, with_label: bool) -> Rows:
    """Reads an image classification set of torchvision: its training images, then its test images.

    Raises InputError if the set is not known, or if its files are missing and may not be
    downloaded.
    """
    source = settings.source
    _check_roles(settings, [PART])
    checks.refuse_column_settings(source, settings, ("columns", "drop", "numeric", "categorical"))
    parts = [_pixels_and_targets(source, part) for part in _open_torchvision(settings)]
    pixels = np.concatenate([pixels for pixels, _ in parts])
    targets = np.concatenate([targets for _, targets in parts])
    if len(pixels) != len(targets) or targets.ndim != 1:
        raise checks.unusable(source, "is not a set of images with one class each. Choose another.")
    keep = slice(0, settings.first)
    images = channels_first(source, pixels[keep], settings.image_shape)
    ids = [row_ids(len(pixels))[keep]]
    # A passive party divides its own rows by them.
    own = np.repeat(
        np.array(("train", "test"), object), [len(pixels_of_part) for pixels_of_part, _ in parts]
    )
    labels = targets[keep].astype(np.float64) if with_label else None
    return Rows(ids, labels, images, own[keep] if settings.split else None)


def _check_roles(settings: DataSettings, splits: Sequence[str] = ()) -> None:
    if without_row(settings, ()).id:
        raise checks.unusable(
            settings.source, "has no id column: the row's number is its id. Remove data.id."
        )
    checks.require_names(
        settings.source, "label", [settings.label] if settings.label else [], [TARGET]
    )
    for key in ("event", "weight"):
        column = getattr(settings, key)
        checks.require_names(settings.source, key, [column] if column else [], [])
    checks.require_names(settings.source, "labels", settings.labels, [TARGET])
    checks.require_names(
        settings.source, "split", [settings.split] if settings.split else [], splits
    )


def _open_torchvision(settings: DataSettings) -> list[Any]:
    """Opens the set's training and test part."""
    source, name = settings.source, settings.source.removeprefix("torchvision:")
    from torchvision import datasets

    if name not in datasets.__all__:
        raise checks.unusable(
            source,
            "is not a set of torchvision. Choose one such as "
            f"{checks.nearest(name, datasets.__all__)}.",
        )
    kind = getattr(datasets, name)
    parameters = inspect.signature(kind).parameters
    if "download" not in parameters or not {"train", "split"} & parameters.keys():
        raise checks.unusable(
            source, "has no training and test part that can be downloaded. Choose another set."
        )
    choices = (
        [{"train": True}, {"train": False}]
        if "train" in parameters
        else [{"split": "train"}, {"split": "test"}]
    )
    try:
        return [
            kind(settings.download_dir, download=settings.download, **choice) for choice in choices
        ]
    except Exception:  # noqa: BLE001 - every set raises other errors for files that are missing, cut or unreachable
        if settings.download:
            raise checks.unreadable(
                source,
                f"could not be downloaded to {settings.download_dir} or read. Check the network "
                "and data.download_dir.",
            ) from None
        raise checks.unreadable(
            source,
            f"its files are missing or damaged in data.download_dir ({settings.download_dir}). Set "
            "data.download = true.",
        ) from None


def _pixels_and_targets(source: str, part: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    targets = getattr(part, "targets", None)
    targets = getattr(part, "labels", None) if targets is None else targets
    pixels = getattr(part, "data", None)
    if pixels is None or targets is None:
        raise checks.unusable(
            source, "does not hold its images and classes in memory. Choose another set."
        )
    return np.asarray(pixels), np.asarray(targets)
