"""ModelNet10 (Wu et al. 2015): twelve views of furniture."""

from __future__ import annotations

from vfl_papers import recipes
from vfl_papers.dataset import DataSet, PaperUse
from vfl_papers.families.modelnet import modelnet

DATASET: DataSet = modelnet(
    "ModelNet10",
    4_899,
    224,
    ("ModelNet10", "modelnet10_images_new_12x", "modelnet10"),
    (
        PaperUse(
            "SS-VFL",
            "Table 1; Fig. 3",
            "views",
            12,
            recipes.ssvfl(recipes.LARGE_RESNET18, 512),
            silent="The paper does not give the size of a view, the renderer, or the batch size.",
        ),
    ),
)
