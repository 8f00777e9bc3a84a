"""Gradient-boosted decision trees with LightGBM, only at the active party: a baseline, on its own
columns.

In a recipe of one party with all columns, the trees use them all (a study's ``combined``). Nothing
crosses, and no later phase gets anything: the trees end with the phase.
"""

from vfl_party.methods.gbdt.phase import ActiveGbdt, PassiveGbdt
from vfl_party.methods.gbdt.settings import GbdtSettings
from vfl_party.phases.method import Method, silent

METHOD = Method(GbdtSettings, ActiveGbdt, PassiveGbdt, kept=False, traffic=silent)
