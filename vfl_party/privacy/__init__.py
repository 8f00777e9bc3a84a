"""Protects a party's tensors and models before others see them: noise, DP-SGD and its accounting."""

from vfl_party.privacy.gaussian import GaussianNoise
from vfl_party.privacy.iso import IsoNoise

__all__ = ["GaussianNoise", "IsoNoise"]
