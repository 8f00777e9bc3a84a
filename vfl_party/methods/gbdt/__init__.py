"""Gradient-boosted decision trees with LightGBM, at the active party alone: a baseline, on its own columns.

In a recipe of one party that has all columns it is trees on all (a study's ``combined``). Nothing crosses, and nothing
is handed on: the trees end with the phase.
"""

from vfl_party.method import Method, silent
from vfl_party.methods.gbdt.phase import ActiveGbdt, PassiveGbdt
from vfl_party.methods.gbdt.settings import GbdtSettings

METHOD = Method(GbdtSettings, ActiveGbdt, PassiveGbdt, kept=False, traffic=silent)
