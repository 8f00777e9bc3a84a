"""What a recipe says about the head."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vfl_common.config.budget import Budget

UPLOAD, TRAIN = 0, 1  # the two rounds: a checkpoint lies between them, so that a later death need not repeat the upload


class HeadSettings(Budget):
    """Training of the top model on representations that are received once. A step is one batch.

    ``own_encoder``: the active party's; ``frozen`` as the phase before left it (SS-VFL-I), or ``trained`` together with
    the top model (FedOnce). ``noise``: σ of what a passive party adds to its upload, and to all that it sends for
    evaluation and prediction afterwards (FedOnce, Table 8: "added to all the representations").
    """

    own_encoder: Literal["frozen", "trained"] = "frozen"
    noise: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0
