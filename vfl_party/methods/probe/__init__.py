"""Probes frozen features of rows that different parties hold: a linear model, and a vote of the
nearest neighbours.
"""

from vfl_party.methods.probe.active import ActiveProbe
from vfl_party.methods.probe.exchanges import traffic
from vfl_party.methods.probe.passive import PassiveProbe
from vfl_party.methods.probe.settings import ProbeSettings
from vfl_party.phases.method import Method

METHOD = Method(ProbeSettings, ActiveProbe, PassiveProbe, rows="own", traffic=traffic)
