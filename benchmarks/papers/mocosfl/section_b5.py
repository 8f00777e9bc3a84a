"""MocoSFL, Appendix B.5."""

from __future__ import annotations

from benchmarks.papers.mocosfl.resistance import SHARES, table
from benchmarks.papers.rules import Claim, below

TABLE = table(
    "Appendix B.5",
    "how well images are inverted: MSE, SSIM and PSNR, with CIFAR-100 as the source",
    "appendix B.5, the table without a number (for Table 4 of the main part)",
    SHARES,
    small=(),
    metrics={"MSE": "mse", "SSIM": "ssim", "PSNR": "psnr"},
    figures={
        "MocoSFL-3, MSE": (0.039, 0.033, 0.039),
        "MocoSFL-3, SSIM": (0.487, 0.545, 0.424),
        "MocoSFL-3, PSNR": (15.35, 15.93, 14.79),
        "MocoSFL-1, MSE": (0.045, 0.035, 0.039),
        "MocoSFL-1, SSIM": (0.417, 0.593, 0.438),
        "MocoSFL-1, PSNR": (14.43, 16.32, 14.74),
    },
    claims=(
        Claim("the SSIM of MocoSFL-3 is below 0.6", below("MocoSFL-3, SSIM", 0.6), ours=True),
        Claim("the SSIM of MocoSFL-1 is below 0.6", below("MocoSFL-1, SSIM", 0.6), ours=True),
    ),
)
