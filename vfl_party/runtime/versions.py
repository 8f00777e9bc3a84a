"""Lists names and versions of the plug-ins that a party needs in a run: {``group:name``:
``distribution version``}.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vfl_common.config.sources import get_reader
from vfl_common.errors import Code, InputError
from vfl_party.assembly.party import OpenedParty
from vfl_party.data import load as data
from vfl_party.models import external, metrics
from vfl_party.outbound import codecs, transforms
from vfl_party.phases.course import REGISTRY


def get_shared_versions(opened: OpenedParty) -> dict[str, str]:
    """Returns the versions of the plug-ins that the recipe names for all parties. The server
    compares them between the parties that have them.

    Only the active party's versions contain metrics, and a party with its own encoder leaves it
    out.
    """
    recipe = opened.recipe
    versions = _get_method_versions(opened)
    for phase in recipe.phases:
        versions |= codecs.REGISTRY.version(phase.codec)
        for transform in phase.transforms:
            versions |= transforms.REGISTRY.version(transform.kind)
    for table in recipe.wire:
        versions |= codecs.REGISTRY.version(table.codec)
    if opened.name == recipe.active.name:
        for metric in recipe.task.metrics:
            versions |= metrics.PLUGINS.version(metric)
    versions |= _get_top_versions(opened)
    return versions | (
        _get_encoder_versions(opened) if opened.encoder == recipe.model.encoder else {}
    )


def get_model_versions(opened: OpenedParty) -> dict[str, str]:
    """Returns the versions of the plug-ins on which the party's models and their results depend."""
    return _get_method_versions(opened) | _get_encoder_versions(opened) | _get_top_versions(opened)


def get_reader_versions(opened: OpenedParty) -> dict[str, str]:
    """Returns the version of the plug-in that reads the party's data; empty if no plug-in does."""
    name = get_reader(opened.settings.source)
    return data.PLUGINS.version(name) if name is not None else {}


def require_same(path: Path, before: Mapping[str, str], installed: Mapping[str, str]) -> None:
    """Raises InputError if the run in ``path`` began with another version of a plug-in."""
    for name in sorted(before.keys() & installed.keys()):
        if before[name] != installed[name]:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{path}: the run began with the plug-in {name} from {before[name]}, and "
                f"{installed[name]} "
                "is installed. Install the earlier version, or begin a new run.",
            )


def _get_method_versions(opened: OpenedParty) -> dict[str, str]:
    course, versions = opened.course, dict[str, str]()
    for phase in (*course.before, *course.phases):
        versions |= REGISTRY.version(phase.kind)
    return versions


def _get_encoder_versions(opened: OpenedParty) -> dict[str, str]:
    place = opened.recipe.party(opened.name)
    if place is not None and not place.features:
        return {}
    return external.ENCODER_PLUGINS.version(opened.encoder.kind)


def _get_top_versions(opened: OpenedParty) -> dict[str, str]:
    recipe = opened.recipe
    if opened.name != recipe.active.name:
        return {}
    combines = external.COMBINATION_PLUGINS.version(str(recipe.model.combine))
    return combines | external.TOP_PLUGINS.version(recipe.model.top.kind)
