"""FedCVT (Kang, Liu and Liang 2022): cross-view training of two parties with few aligned and fewer
labelled rows.
"""

from vfl_party.methods.fedcvt.active import ActiveFedCVT
from vfl_party.methods.fedcvt.encoders import two_networks
from vfl_party.methods.fedcvt.passive import PassiveFedCVT
from vfl_party.methods.fedcvt.settings import FedCVTSettings
from vfl_party.methods.fedcvt.traffic import traffic
from vfl_party.phases.method import Method

METHOD = Method(
    FedCVTSettings, ActiveFedCVT, PassiveFedCVT, two_networks, traffic=traffic, encodes=True
)
