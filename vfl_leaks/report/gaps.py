"""Finds exchanges that lack a defence which other exchanges have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vfl_common.config.recipe import Recipe
from vfl_common.text import list_names
from vfl_leaks.scene.recording import ROW_TENSORS
from vfl_party.outbound.declared import Role, Sent
from vfl_party.phases.context import Party


def find_gaps(parties: Iterable[Party]) -> list[str]:
    """Returns a sentence for each transform that protects only some of the exchanges of embeddings
    or gradients.
    """
    sentences: dict[str, None] = {}
    for party in parties:
        # {kind of tensors: {phase and exchange: transforms}}
        of_kind: dict[str, dict[str, set[str]]] = {}
        for (phase, name), opened in party.exchanges.items():
            passive = party.role == "passive"
            sent = opened.exchange.up if passive else opened.exchange.down
            if opened.exchange.asks == "active" and sent.kind in ROW_TENSORS:
                used = _transforms(party.recipe, phase, name, sent, party.role)
                of_kind.setdefault(sent.kind.label, {})[f"{phase}/{name}"] = used
        for kind, places in of_kind.items():
            transforms = sorted(set().union(*places.values()))
            variants = Counter(name.partition(" (")[0] for name in transforms)
            for transform in transforms:
                without = [place for place, used in places.items() if transform not in used]
                having = [place for place in places if place not in without]
                if without:
                    short = transform.partition(" (")[0]
                    label = short if variants[short] == 1 else transform
                    sentences[_describe_gap(f"{kind}s", label, without, having)] = None
    return list(sentences)


def _transforms(recipe: Recipe, phase: str, exchange: str, sent: Sent, role: Role) -> set[str]:
    """Returns the transforms of the method and of the recipe that are applied to the tensors
    ``sent``.
    """
    of_method = {
        _describe(use.kind, use.settings) for use in sent.through if use.role in (None, role)
    }
    of_recipe = [
        transform
        for settings in recipe.phases
        if settings.name == phase
        for transform in settings.transforms
    ]
    used = [use for use in of_recipe if use.exchange == exchange and use.sent_by == role]
    return of_method | {_describe(use.kind, use.settings) for use in used}


def _describe(kind: str, settings: Mapping[str, Any]) -> str:
    """Returns a text of a transform and its settings, which make different defences."""
    settings_text = ", ".join(f"{key} = {value}" for key, value in sorted(settings.items()))
    return f"{kind} ({settings_text})" if settings_text else kind


def _describe_gap(what: str, transform: str, without: Sequence[str], having: Sequence[str]) -> str:
    return (
        f"{transform} protects {what} of {list_names(having)} only: {list_names(without)} "
        f"{'leaves' if len(without) == 1 else 'leave'} without it. Name each exchange in the "
        "transforms of its phase."
    )
