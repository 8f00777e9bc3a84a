"""What a recipe says about the head."""

from __future__ import annotations

from vfl_common.config.budget import Budget

UPLOAD, TRAIN = 0, 1  # the two rounds: a checkpoint lies between them, so that nothing is uploaded twice


class HeadSettings(Budget):
    """Training of the top model on representations that are received once. A step is one batch."""
