"""Resolves the names of runs to serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vfl_common.production.registry import PRODUCTION, WORDS, ModelRegistry


@dataclass(frozen=True)
class Chosen:
    """A run to serve.

    ``folder``: of the run. ``follows``: the name of the recipe whose run in production this is, so
    that another takes its place when it is promoted; '' for a run that stays.
    """

    folder: Path
    follows: str = ""


def choose(registry: ModelRegistry, text: str, recipe: Callable[[], str]) -> Chosen:
    """Returns the run that is given as an id, a folder, ``production``, ``latest``, or as
    ``NAME:production`` or ``NAME:latest``. Raises InputError if there is none.

    ``recipe``: returns the name of the recipe that is meant without NAME.
    """
    name, _, word = text.rpartition(":")
    if word not in WORDS:
        return Chosen(registry.folder(text))
    of = name or recipe()
    return Chosen(registry.folder(word, of), of if word == PRODUCTION else "")
