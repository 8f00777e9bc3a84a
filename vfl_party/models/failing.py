"""Says where a user's own code has failed."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

_TORCH = str(Path(torch.__file__).parent)


def where_it_failed(error: Exception) -> str:
    """Returns ``in my_model.py, line 12: ValueError: …``, with the last line outside of torch."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not each.filename.startswith(_TORCH)] or frames
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"in {Path(own[-1].filename).name}, line {own[-1].lineno}: {why}" if own else why
