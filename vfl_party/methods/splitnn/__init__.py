"""Supervised split training: every party an encoder, the active party the labels and the top model."""

from vfl_party.methods import Method
from vfl_party.methods.splitnn.active import ActiveSplitNN
from vfl_party.methods.splitnn.passive import PassiveSplitNN
from vfl_party.methods.splitnn.settings import SplitNNSettings

METHOD = Method(SplitNNSettings, ActiveSplitNN, PassiveSplitNN)  # type: ignore[arg-type]
