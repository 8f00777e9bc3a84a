"""ImageNet100: a hundred classes of ImageNet, drawn at random."""

from __future__ import annotations

from vfl_papers import recipes
from vfl_papers.dataset import DataSet, PaperUse
from vfl_papers.families.imagenet import imagenet

DATASET: DataSet = imagenet(
    "ImageNet100",
    100,
    131_000,
    (
        PaperUse(
            "SS-VFL",
            "Table 1; Figs. 2, 3",
            "halves",
            2,
            recipes.ssvfl(recipes.LARGE_RESNET50, 2048),
            silent="The paper draws its classes at random and does not name them, and does not say "
            "which half is whose, or how images are brought to one size.",
        ),
    ),
)
