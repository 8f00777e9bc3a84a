"""NUS-WIDE (Chua et al. 2009): images of Flickr, as low-level features and as tags."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vfl_common.errors import Code, InputError
from vfl_papers import recipes
from vfl_papers.columns.nuswide_files import (
    FEATURES,
    PUBLISHER,
    ROWS,
    TAG_COLUMNS,
    TAGS,
    TRUTH,
    VIEWS,
    Concepts,
    ImageFeatures,
    needs,
    of_view,
)
from vfl_papers.columns.official import row_count_note
from vfl_papers.dataset import (
    Content,
    ContentPart,
    DataSet,
    Division,
    Files,
    Form,
    PaperUse,
    Request,
)
from vfl_papers.dividing import COLUMNS, make_parts, pick_columns

_CLASSES = 10
_NEEDS = (FEATURES, TAGS, TRUTH)
# Table III and Appendix B.
_FEDHSSL = recipes.fedhssl({"kind": "mlp", "hidden": [512]}, 128, rounds=10, batch_size=512)
_SILENT = (
    "The paper does not say which ten concepts it takes, nor what becomes of images that show "
    "several of them. As its released code does, the ten concepts with the most images are taken, "
    "and the images that show exactly one of them. It does not say how wide its two layers are."
)


def _read(files: Files, _: Request) -> Content:
    features, tags, truth = files.values()
    concepts = Concepts(truth)
    if len(concepts.names) < _CLASSES:
        raise InputError(
            Code.FILE_INVALID,
            f"{truth}: must hold at least {_CLASSES} concepts (got {len(concepts.names)}). "
            "Download it again.",
        )
    names = concepts.names[:_CLASSES]
    shown_NC, splits = concepts.read(names)
    rows = np.flatnonzero(shown_NC.sum(axis=1) == 1)
    whole = ImageFeatures(features, tags)
    return Content(
        shown_NC[rows].argmax(axis=1),
        splits[rows],
        lambda own: whole.blocks(rows[own]),
        ids=np.char.zfill(rows.astype("S6"), 6),
        classes=tuple(names),
        differs=row_count_note(len(shown_NC), sum(ROWS.values())),
    )


def _modalities(_: Content, request: Request) -> Sequence[ContentPart]:
    image = [name for view in VIEWS for name in of_view(view)]
    return make_parts(request, [pick_columns(image), pick_columns(TAG_COLUMNS)])


DATASET = DataSet(
    title="NUS-WIDE",
    publisher=PUBLISHER,
    holds="634 numbers of an image, and which of 1,000 tags it has; ten classes",
    rows=sum(ROWS.values()),
    task={"kind": "multiclass", "classes": _CLASSES},
    forms=tuple(Form(needs(_NEEDS, packed=packed), _read) for packed in (True, False)),
    divisions={
        "modalities": Division(
            "the features of images at one, the tags at the other", _modalities, (2,)
        ),
        "columns": COLUMNS,
    },
    uses=(
        PaperUse(
            "FedHSSL",
            "Tables IV-VII, IX-XII; Figs. 5-8",
            "modalities",
            2,
            _FEDHSSL,
            silent=_SILENT,
        ),
    ),
    memory="about 500 MB",
)
