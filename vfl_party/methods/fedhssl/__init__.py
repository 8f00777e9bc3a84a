"""FedHSSL (He et al. 2022): self-supervised pretraining across parties and within each, and its
sub-procedures.
"""

from vfl_party.methods.fedhssl.encoders import kept_encoder, part_of
from vfl_party.methods.fedhssl.phase import ActiveFedHSSL, PassiveFedHSSL
from vfl_party.methods.fedhssl.settings import FedHSSLSettings
from vfl_party.methods.fedhssl.traffic import traffic
from vfl_party.phases.method import Method

METHOD = Method(
    FedHSSLSettings, ActiveFedHSSL, PassiveFedHSSL, kept_encoder, part_of, traffic=traffic
)
