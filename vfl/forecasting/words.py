"""Formats bit rates and times for people."""

from __future__ import annotations


def format_rate(bits: float) -> str:
    """Formats a bit rate, such as ``100 Mbit/s``."""
    for factor, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits >= factor:
            return f"{bits / factor:.4g} {unit}"
    return f"{bits:.4g} bit/s"


def format_duration(time_s: float) -> str:
    """Formats a time in seconds: ``0.35 s``, ``421 s``, ``12 min``, ``3.5 h``."""
    if time_s < 600:
        return f"{time_s:.2g} s" if time_s < 10 else f"{time_s:.0f} s"
    return f"{time_s / 60:.0f} min" if time_s < 6000 else f"{time_s / 3600:.1f} h"


def format_number(value: float) -> str:
    """Formats a large number: ``812``, ``1.24 M``, ``5.6 G``."""
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g}"
