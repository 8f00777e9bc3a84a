"""Names and versions of the plug-ins that a party's part in a run needs: {``group:name``:
``distribution version``}.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vfl_common.config.data import reader_of
from vfl_common.errors import Code, InputError
from vfl_party.assembly.party import OpenedParty
from vfl_party.data import load as data
from vfl_party.models import metrics
from vfl_party.models.encoders import plugin
from vfl_party.models.top import combination
from vfl_party.models.top import plugin as tops
from vfl_party.outbound import codecs, transforms
from vfl_party.phases.course import REGISTRY


def get_shared_versions(opened: OpenedParty) -> dict[str, str]:
    """Returns those that the recipe names for all: the server compares them between the parties
    that have them.

    Metrics are computed at the active party alone, and a party may have an encoder of its own.
    """
    recipe = opened.recipe
    versions = _of_methods(opened)
    for phase in recipe.phases:
        versions |= codecs.REGISTRY.version(phase.codec)
        for transform in phase.transforms:
            versions |= transforms.REGISTRY.version(transform.kind)
    for table in recipe.wire:
        versions |= codecs.REGISTRY.version(table.codec)
    if opened.name == recipe.active.name:
        for metric in recipe.task.metrics:
            versions |= metrics.PLUGINS.version(metric)
    versions |= _of_top(opened)
    return versions | (_of_encoder(opened) if opened.encoder == recipe.model.encoder else {})


def modelling(opened: OpenedParty) -> dict[str, str]:
    """Returns those that decide what the party's models are and compute."""
    return _of_methods(opened) | _of_encoder(opened) | _of_top(opened)


def reading(opened: OpenedParty) -> dict[str, str]:
    """Returns the one that reads the party's data, if one does."""
    name = reader_of(opened.settings.source)
    return data.PLUGINS.version(name) if name is not None else {}


def require_same(path: Path, then: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises InputError if the run in ``path`` began with another version of a plug-in that is
    needed now.
    """
    for name in sorted(then.keys() & now.keys()):
        if then[name] != now[name]:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{path}: the run began with the plug-in {name} of {then[name]}, and {now[name]} "
                "is installed. Install the former, or begin a new run.",
            )


def _of_methods(opened: OpenedParty) -> dict[str, str]:
    course, versions = opened.course, dict[str, str]()
    for phase in (*course.before, *course.phases):
        versions |= REGISTRY.version(phase.kind)
    return versions


def _of_encoder(opened: OpenedParty) -> dict[str, str]:
    place = opened.recipe.party(opened.name)
    return plugin.PLUGINS.version(opened.encoder.kind) if place is None or place.features else {}


def _of_top(opened: OpenedParty) -> dict[str, str]:
    recipe = opened.recipe
    if opened.name != recipe.active.name:
        return {}
    combines = combination.PLUGINS.version(str(recipe.model.combine))
    return combines | tops.PLUGINS.version(recipe.model.top.kind)
