"""What was measured of a model with some of its parties; see ``vfl_party.predict.quality``."""

from vfl_party.predict.quality import Quality, read_quality

__all__ = ["Quality", "read_quality"]
