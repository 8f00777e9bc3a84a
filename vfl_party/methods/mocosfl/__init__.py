"""MocoSFL (Li et al. 2023): momentum contrast over rows that different parties hold, by split federated learning.

The parties hold different rows of the same columns. Each has a bottom; the active party has the tail, the memory of
keys, and labels for a probe; the aggregation server averages the bottoms: SplitFed's two servers.
"""

from __future__ import annotations

from vfl_party.method import Method
from vfl_party.methods.mocosfl.active import ActiveMocoSFL
from vfl_party.methods.mocosfl.course import build_bottom, build_tail
from vfl_party.methods.mocosfl.passive import PassiveMocoSFL
from vfl_party.methods.mocosfl.settings import MocoSFLSettings
from vfl_party.methods.mocosfl.traffic import traffic

METHOD = Method(
    MocoSFLSettings,
    ActiveMocoSFL,
    PassiveMocoSFL,
    encoder=lambda settings, make: build_bottom(make.recipe, settings),
    tail=lambda settings, recipe: build_tail(recipe, settings),
    rows="own",
    traffic=traffic,
)
