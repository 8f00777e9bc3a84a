"""BHI, breast histopathology images (Janowczyk and Madabhushi 2016): patches of biopsies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vfl_common.errors import Code, InputError
from vfl_papers import recipes
from vfl_papers.dataset import TEST, TRAIN, Content, DataSet, Files, Form, Need, PaperUse, Request
from vfl_papers.families.pictured import Pictured, views
from vfl_papers.formats.trees import folders_in, images_in
from vfl_party.base.seeds import derive_seed, draw_permutation

_FOLDER = Need("IDC_regular_ps50_idx5", (".",), folder=True)
_PUBLISHED = 277_524
_CLASSES = ("no cancer", "cancer (IDC)")
_SPLIT = "80 % of the patients were drawn for training, and the others are for testing"


def _read(files: Files, request: Request) -> Content:
    """Puts images of each patient with the same label together, at random. Images that do not fill
    a row are left out.
    """
    patients = _patients(files[_FOLDER.name])
    order = draw_permutation(derive_seed(request.seed, "bhi", "patients"), len(patients))
    training = set(order[: round(0.8 * len(patients))].tolist())
    rows, k, images = Pictured(request.options["size"]), request.parties, 0
    for place, patient in enumerate(patients):
        for label in (0, 1):
            files_ = images_in(patient / str(label))
            images += len(files_)
            order = draw_permutation(derive_seed(request.seed, "bhi", place, label), len(files_))
            for start in range(0, len(files_) - k + 1, k):
                own = [files_[at] for at in order[start : start + k]]
                split = TRAIN if place in training else TEST
                rows.add(own, label, split, f"{patient.name}-{label}-{start // k:05d}")
    return rows.content(_CLASSES, _SPLIT, _find_unread(images - k * len(rows)), _differs(images))


def _patients(root: Path) -> Sequence[Path]:
    """Returns the patients' folders, whose names are numbers. Raises InputError."""
    folders = [folder for folder in folders_in(root) if folder.name.isdigit()]
    inner = root / _FOLDER.name
    if not folders and inner.is_dir():
        return _patients(inner)
    if not any(images_in(folder / label) for folder in folders for label in "01"):
        raise InputError(
            Code.FILE_INVALID,
            f"{root}: holds no images of a patient, as in 10253/0 and 10253/1. Unpack the "
            "archive of BHI into it.",
        )
    return folders


def _find_unread(images: int) -> list[str]:
    if not images:
        return []
    return [f"{images:,} images had no partner of the same patient and label, and were left out."]


def _differs(images: int) -> list[str]:
    if images == _PUBLISHED:
        return []
    return [f"The folder has {images:,} images (published: {_PUBLISHED:,})."]


DATASET = DataSet(
    title="BHI",
    publisher="Kaggle: paultimothymooney/breast-histopathology-images (IDC_regular_ps50_idx5)",
    holds="two colour images of 50 × 50 of one patient with the same label",
    rows=138_000,
    task={"kind": "binary", "positive": 1},
    forms=(Form((_FOLDER,), _read),),
    divisions={"patients": views("one of the images of a patient with the same label", (2, 3, 4))},
    uses=(
        PaperUse(
            "FedHSSL",
            "Tables IV-VII, IX-XII; Figs. 5-8",
            "patients",
            2,
            recipes.fedhssl(recipes.RESNET18, 512),
            silent="The paper does not say how images are paired, how many pairs there are, or "
            "what happens to images at an edge, which are smaller than 50 × 50. Here each image "
            "is in one pair, drawn at random, and smaller ones are enlarged.",
        ),
    ),
    memory="about 300 MB",
    options={"size": (50, "the height and width of an image, in pixels")},
)
