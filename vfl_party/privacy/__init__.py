"""What a party does to its tensors before others see them."""

from vfl_party.privacy.gaussian import GaussianNoise
from vfl_party.privacy.iso import IsoNoise

__all__ = ["GaussianNoise", "IsoNoise"]
