"""Says which phases stand alone in a recipe: those whose model no other phase works with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Kinds of phases that train no encoder, and share no model with other phases. Plug-ins are not
# known here: their recipes have a model, and ``vfl_party.methods.check_fit`` says if they must be
# alone.
_NO_ENCODER = ("gbdt", "secureboost")


def has_no_encoder(recipe: Mapping[str, Any]) -> bool:
    """Whether the tables of a recipe have a phase of a kind that trains no encoder. Raises
    ValueError if not alone.
    """
    phases = recipe.get("phases")
    if not isinstance(phases, (list, tuple)):
        return False
    kinds = [phase.get("kind") if isinstance(phase, dict) else None for phase in phases]
    alone = next((kind for kind in kinds if kind in _NO_ENCODER), None)
    if alone is not None and len(kinds) > 1:
        raise ValueError(must_be_alone(f"a phase of kind {alone!r}"))
    if alone is not None and recipe.get("start") is not None:
        raise ValueError(must_not_start(f"a phase of kind {alone!r}"))
    return alone is not None


def must_be_alone(phase: str) -> str:
    """Says that a phase has other phases beside it, and cannot."""
    return (
        f"phases: {phase} has a model of its own that no other phase works with; remove the "
        "other phases"
    )


def must_not_start(phase: str) -> str:
    """Says that a phase starts from an earlier run, and cannot."""
    text = f"start: {phase} trains a model of its own, and can take nothing from an earlier run"
    return f"{text}; remove start (in a study: pretrain)"
