"""Builds encoders and top models, and combines embeddings.

Build modules on the CPU inside ``seed_torch(...)`` and move them to a device afterwards, so that
their weights are the same on every device.
"""

from vfl_party.base.devices import generator, seed_generator, seed_torch
from vfl_party.models.encoders import (
    build_checked_encoder,
    build_encoder,
    needs_codes,
    width_of,
)
from vfl_party.models.external import (
    Combination,
    Encoder,
    Top,
    check_combination,
    check_encoder,
    check_top,
)
from vfl_party.models.layers import (
    InputSpec,
    StochasticEncoder,
    TwoTowers,
    build_predictor,
    build_projector,
    deterministic,
    mark_top,
    top_state,
)
from vfl_party.models.top import build_joint, build_top
from vfl_party.models.training import CombinedEmbeddings, combine, combine_widths, forward

__all__ = [
    "Combination",
    "CombinedEmbeddings",
    "Encoder",
    "InputSpec",
    "StochasticEncoder",
    "Top",
    "TwoTowers",
    "build_checked_encoder",
    "build_encoder",
    "build_joint",
    "build_predictor",
    "build_projector",
    "build_top",
    "check_combination",
    "check_encoder",
    "check_top",
    "combine",
    "combine_widths",
    "deterministic",
    "forward",
    "generator",
    "mark_top",
    "needs_codes",
    "seed_generator",
    "seed_torch",
    "top_state",
    "width_of",
]
