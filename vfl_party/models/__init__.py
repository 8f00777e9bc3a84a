"""Builds encoders and top models, and combines embeddings. Each kind of encoder has its own file.

Build modules on the CPU inside ``seed_torch(...)`` and move them to a device afterwards, so that
their weights are the same on every device.
"""

from vfl_party.models.combine import CombinedEmbeddings, combine, combine_widths
from vfl_party.models.encoders.build import (
    build_checked_encoder,
    build_encoder,
    needs_codes,
    width_of,
)
from vfl_party.models.encoders.plugin import Encoder, check_encoder
from vfl_party.models.encoders.spec import InputSpec
from vfl_party.models.init import generator, seed_generator, seed_torch
from vfl_party.models.parts import mark_top, top_state
from vfl_party.models.precision import forward
from vfl_party.models.projector import build_predictor, build_projector
from vfl_party.models.stochastic import StochasticEncoder, deterministic
from vfl_party.models.top.build import build_joint, build_top
from vfl_party.models.top.combination import Combination, check_combination
from vfl_party.models.top.plugin import Top, check_top
from vfl_party.models.towers import TwoTowers

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
