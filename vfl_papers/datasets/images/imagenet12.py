"""ImageNet-12: twelve classes of ImageNet."""

from __future__ import annotations

from vfl_papers import recipes
from vfl_papers.dataset import DataSet, PaperUse
from vfl_papers.families.imagenet import imagenet

DATASET: DataSet = imagenet(
    "ImageNet-12",
    12,
    16_000,
    (
        PaperUse(
            "MocoSFL",
            "main text",
            "rows",
            5,
            recipes.mocosfl(recipes.LARGE_RESNET18),
            silent="Only the paper's appendix is at hand, which names neither the classes nor the "
            "size: they are drawn, unless `classes` names them.",
        ),
    ),
)
