"""Reads bandwidth and latency as people write them, and times a forecast's exchanges with them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from vfl_common.errors import Code, InputError

_BANDWIDTH = re.compile(r"(\d+\.?\d*|\.\d+)\s*([kmgt]?)(bit|bits|b|bp|byte|bytes)(?:/s|s|ps)?", re.IGNORECASE)
_LATENCY = re.compile(r"(\d+\.?\d*|\.\d+)\s*(us|µs|ms|s)", re.IGNORECASE)
_FACTOR = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_LONGEST_S = 3600.0


@dataclass(frozen=True)
class Network:
    """All links are alike. ``bandwidth``: bits a second, in each direction; ``latency_s``: one way."""

    bandwidth: float
    latency_s: float

    @classmethod
    def read(cls, bandwidth: str, latency: str) -> Network:
        """Reads texts such as ``100Mbit/s`` and ``20ms``. Raises InputError."""
        return cls(read_bandwidth(bandwidth), read_latency(latency))

    def seconds(self, round_trips: int, message_bytes: int) -> float:
        """Times exchanges that follow one another: a round trip each, and all bytes over the answering party's link.

        That link is the narrowest because all parties share it: their bundles come in over it. The answers wait for the
        last bundle, then go out over it.
        """
        return round_trips * 2 * self.latency_s + message_bytes * 8 / self.bandwidth


def read_bandwidth(text: str) -> float:
    """Reads bits a second: ``10Mbit``, ``1Gbit/s``, ``100 Mbps``, ``12.5MB/s``; B is bytes. Raises InputError."""
    found = _BANDWIDTH.fullmatch(text.strip())
    value = 0.0
    if found is not None:
        unit = found[3]
        is_bytes = unit.lower().startswith("byte") or (unit[0] == "B" and not unit.lower().startswith("bit"))
        value = float(found[1]) * _FACTOR[found[2].lower()] * (8 if is_bytes else 1)
    if not 0 < value < math.inf:
        text = f"--bandwidth {text}: give a number above 0 with a unit, as in 10Mbit/s, 1Gbit, 100MB/s"
        raise InputError(Code.CONFIG_INVALID, text)
    return value


def read_latency(text: str) -> float:
    """Reads seconds: ``20ms``, ``0.1s``, ``500us``, ``0``. Raises InputError."""
    found = _LATENCY.fullmatch(text.strip())
    value = float(found[1]) * _SECONDS[found[2].lower()] if found is not None else 0.0 if text.strip() == "0" else None
    if value is None or value > _LONGEST_S:
        text = f"--latency {text}: give a number with a unit, as in 20ms or 0.1s, at most an hour"
        raise InputError(Code.CONFIG_INVALID, text)
    return value
