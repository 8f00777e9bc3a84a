"""Supervised split training: every party has an encoder; the active party has the labels and the
top model.
"""

from vfl_party.methods.splitnn.active import ActiveSplitNN
from vfl_party.methods.splitnn.mid import drawn, stochastic_encoder
from vfl_party.methods.splitnn.passive import PassiveSplitNN
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.methods.splitnn.traffic import traffic
from vfl_party.phases.method import Method

METHOD = Method(
    SplitNNSettings,
    ActiveSplitNN,
    PassiveSplitNN,
    stochastic_encoder,
    late=lambda settings: settings.late_policy,
    in_flight=lambda settings: settings.under_way,
    traffic=traffic,
    protects=drawn,
    encodes=True,
)
