"""What a person asks of ``vfl prepare``, checked against the data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vfl.preparing.dataset import DataSet, Division, PaperUse, Request
from vfl_common.errors import Code, InputError


@dataclass(frozen=True)
class Asked:
    """What is to be prepared: a data set, divided in one way, as a paper uses it.

    ``validation``: the share of the training rows that is set apart. ``numbers``: the use whose
    numbers the recipe has, as far as the division fits it; None: no paper divides so.
    """

    name: str
    dataset: DataSet
    use: PaperUse
    division: Division
    request: Request
    validation: float
    numbers: PaperUse | None


def asked(
    name: str,
    dataset: DataSet,
    *,
    parties: int | None,
    seed: int,
    paper: str | None,
    divide: str | None,
    deal: str | None,
    active: int,
    validation: float | None,
    options: Mapping[str, Any],
) -> Asked:
    """Fills in the paper's numbers; the arguments are those of ``vfl.prepare``. Raises InputError
    for what does not fit the data set.
    """
    use = _use(dataset, paper, divide)
    division = _division(dataset, use, divide)
    count = _count(division, use, parties)
    request = Request(
        count,
        _active(division, active, count),
        seed,
        deal or use.deal,
        _options(dataset, division, options),
    )
    if deal is not None and division.aligned:
        text = (
            f"deal: the parties have the same rows of {dataset.title}; give divide = rows with it"
        )
        raise InputError(Code.CONFIG_INVALID, text)
    share = use.validation if validation is None else validation
    uses = (use, *dataset.uses)
    alike = (each for each in uses if dataset.divisions[each.division].aligned == division.aligned)
    return Asked(name, dataset, use, division, request, _share(share), next(alike, None))


def _use(dataset: DataSet, paper: str | None, divide: str | None) -> PaperUse:
    if paper is None:
        return next((use for use in dataset.uses if use.division == divide), dataset.uses[0])
    papers = {use.paper.lower().replace("-", ""): use for use in dataset.uses}
    found = papers.get(paper.lower().replace("-", ""))
    if found is None:
        known = ", ".join(use.paper for use in dataset.uses)
        text = f"paper: {paper!r} has no experiment with {dataset.title}; give {known}, or none"
        raise InputError(Code.CONFIG_INVALID, text)
    return found


def _division(dataset: DataSet, use: PaperUse, divide: str | None) -> Division:
    found = dataset.divisions.get(divide or use.division)
    if found is None:
        known = ", ".join(dataset.divisions)
        text = f"divide: {divide!r} is no way to divide {dataset.title}; give {known}"
        raise InputError(Code.CONFIG_INVALID, text)
    return found


def _count(division: Division, use: PaperUse, parties: int | None) -> int:
    fits = not division.parties or use.parties in division.parties
    count = parties or (use.parties if fits else division.parties[0])
    if count < 1 or (division.parties and count not in division.parties):
        known = " or ".join(map(str, division.parties)) or "1 or more"
        text = f"parties: {count} cannot share {division.says}; give {known}"
        raise InputError(Code.CONFIG_INVALID, text)
    return count


def _active(division: Division, active: int, parties: int) -> int:
    if not 1 <= active <= parties:
        text = f"active: there are {parties} parties; give 1 to {parties}"
        raise InputError(Code.CONFIG_INVALID, text)
    if active != 1 and not division.aligned:
        text = "active: the labels are at a party without images; leave active out"
        raise InputError(Code.CONFIG_INVALID, text)
    return active


def _options(dataset: DataSet, chosen: Division, given: Mapping[str, Any]) -> dict[str, Any]:
    reads = {key: how for how, each in dataset.divisions.items() for key in each.settings}
    for key in given:
        if key in reads and key not in chosen.settings:
            text = f"{key}: only divide = {reads[key]} reads it; give that too, or leave {key} out"
            raise InputError(Code.CONFIG_INVALID, text)
        if key not in dataset.options:
            known = f" but {', '.join(dataset.options)}" if dataset.options else ""
            text = f"{key}: {dataset.title} has no settings{known}; leave it out"
            raise InputError(Code.CONFIG_INVALID, text)
    return {key: given.get(key, default) for key, (default, _) in dataset.options.items()}


def _share(validation: float) -> float:
    if not 0.0 <= validation < 1.0:
        text = f"validation: give a share from 0 to below 1, and not {validation}"
        raise InputError(Code.CONFIG_INVALID, text)
    return validation
