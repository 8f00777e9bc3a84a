"""What a private mechanism costs each time that it is used about a row: its kind and its noise, as
the record keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The largest noise that a line may have: no recipe has as much.
_MAX_NOISE = 1e9


@dataclass(frozen=True)
class Mechanism:
    """Noise on something that one row moves by a bounded length.

    Args:
        kind: ``gaussian``, ``laplace``, or ``response``: randomised response whose noise is kept.
        noise: σ, or Laplace's scale, over the most that a row moves it (L2, or L1 for Laplace); ε
            of randomised response, whose uses cost no more than the first.
        rate: the probability with which a row takes part (Poisson sampling; of Gauss alone).
        times: how often at each use, with independent noise.
        of: of randomised response: names the draw. Uses of one draw cost as much as the first;
            other draws are independent, and add up.
    """

    kind: Literal["gaussian", "laplace", "response"]
    noise: float
    rate: float = 1.0
    times: int = 1
    of: str = ""

    @property
    def text(self) -> str:
        """The mechanism as the record writes it: ``read`` gives the same one, bit for bit."""
        words = (self.kind, repr(self.noise), repr(self.rate), str(self.times), self.of)
        return " ".join(words).rstrip()

    @classmethod
    def read(cls, text: str) -> Mechanism:
        """Reads ``text``. Raises ValueError if it is none."""
        kind, noise, rate, times, *of = text.split(" ")
        if len(of) > 1:
            raise ValueError(text)
        if kind not in ("gaussian", "laplace", "response"):
            raise ValueError(text)
        mechanism = cls(kind, float(noise), float(rate), int(times), *of)  # type: ignore[arg-type]
        if not (
            0 <= mechanism.noise <= _MAX_NOISE
            and 0 <= mechanism.rate <= 1
            and mechanism.times > 0
            and (mechanism.rate == 1 or kind == "gaussian")
        ):
            raise ValueError(text)
        return mechanism
