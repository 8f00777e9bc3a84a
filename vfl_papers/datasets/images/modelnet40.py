"""ModelNet40 (Wu et al. 2015): twelve views of objects, of which FedHSSL takes ten classes."""

from __future__ import annotations

from vfl_papers import recipes
from vfl_papers.dataset import DataSet, PaperUse
from vfl_papers.families.modelnet import modelnet

DATASET: DataSet = modelnet(
    "ModelNet40",
    4_354,
    32,
    ("ModelNet40", "modelnet40_images_new_12x", "modelnet40v1", "modelnet40"),
    (
        PaperUse(
            "FedHSSL",
            "Tables IV-VII, IX-XII; Figs. 5-8",
            "views",
            4,
            recipes.fedhssl(recipes.RESNET18, 512),
            silent="The paper has 24,630 training rows and 6,204 for testing, of about 3,644 and "
            "710 objects, and does not say how they are drawn: `samples = 7` comes near. It does "
            "not give the size of an image; its released code has 32 × 32.",
        ),
    ),
)
