"""Describes a mechanism of differential privacy: its kind and its noise. The record stores the
description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The maximum noise in a line of the record, far above the noise of any recipe.
_MAX_NOISE = 1e9


@dataclass(frozen=True)
class Mechanism:
    """Noise on a value that one row changes by a bounded amount.

    Args:
        kind: ``gaussian``, ``laplace``, or ``response`` for randomised response whose noise is
            kept.
        noise: For ``gaussian``, σ divided by the sensitivity in the L2 norm. For ``laplace``, the
            scale divided by the sensitivity in the L1 norm. For ``response``, ε.
        rate: The probability that a row takes part (Poisson sampling), only for ``gaussian``.
        times: The number of independent draws of noise at each use.
        of: For ``response``, the identifier of the draw. All uses of one draw cost as much as one
            use; the costs of different draws add up.
    """

    kind: Literal["gaussian", "laplace", "response"]
    noise: float
    rate: float = 1.0
    times: int = 1
    of: str = ""

    @property
    def text(self) -> str:
        """The mechanism as text for the record. ``read`` restores it exactly."""
        fields = (self.kind, repr(self.noise), repr(self.rate), str(self.times), self.of)
        return " ".join(fields).rstrip()

    @classmethod
    def read(cls, text: str) -> Mechanism:
        """Restores a mechanism from its ``text``. Raises ValueError if the text is invalid."""
        kind, noise, rate, times, *of = text.split(" ")
        if len(of) > 1 or kind not in ("gaussian", "laplace", "response"):
            raise ValueError(f"not a mechanism of differential privacy (got {text!r})")
        mechanism = cls(kind, float(noise), float(rate), int(times), *of)  # type: ignore[arg-type]
        if not (
            0 <= mechanism.noise <= _MAX_NOISE
            and 0 <= mechanism.rate <= 1
            and mechanism.times > 0
            and (mechanism.rate == 1 or kind == "gaussian")
        ):
            raise ValueError(f"a number of the mechanism is out of range (got {text!r})")
        return mechanism
