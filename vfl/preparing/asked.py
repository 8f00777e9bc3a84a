"""Checks the arguments of ``vfl prepare`` against the data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vfl.preparing.dataset import DataSet, Division, PaperUse, Request
from vfl_common.errors import Code, InputError


@dataclass(frozen=True)
class PreparePlan:
    """A request to prepare: a data set, divided in one way, as a paper uses it.

    ``validation``: the share of the training rows for validation. ``numbers``: the use whose
    hyperparameters the recipe has, as far as the division fits it; None: no paper divides so.
    """

    name: str
    dataset: DataSet
    use: PaperUse
    division: Division
    request: Request
    validation: float
    numbers: PaperUse | None


def resolve(
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
) -> PreparePlan:
    """Fills in the paper's values; the arguments are those of ``vfl.prepare``. Raises InputError
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
        raise InputError(
            Code.CONFIG_INVALID,
            f"deal: the parties have the same rows of {dataset.title}. Give divide = rows with it.",
        )
    share = use.validation if validation is None else validation
    uses = (
        paper_use
        for paper_use in (use, *dataset.uses)
        if dataset.divisions[paper_use.division].aligned == division.aligned
    )
    return PreparePlan(name, dataset, use, division, request, _share(share), next(uses, None))


def _use(dataset: DataSet, paper: str | None, divide: str | None) -> PaperUse:
    if paper is None:
        return next((use for use in dataset.uses if use.division == divide), dataset.uses[0])
    papers = {use.paper.lower().replace("-", ""): use for use in dataset.uses}
    use = papers.get(paper.lower().replace("-", ""))
    if use is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"paper: {paper!r} has no experiment with {dataset.title}. Choose one of "
            f"{', '.join(known.paper for known in dataset.uses)}, or leave it out.",
        )
    return use


def _division(dataset: DataSet, use: PaperUse, divide: str | None) -> Division:
    division = dataset.divisions.get(divide or use.division)
    if division is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"divide: {dataset.title} cannot be divided by {divide!r}. Choose one of "
            f"{', '.join(dataset.divisions)}.",
        )
    return division


def _count(division: Division, use: PaperUse, parties: int | None) -> int:
    fits = not division.parties or use.parties in division.parties
    count = parties or (use.parties if fits else division.parties[0])
    if count < 1 or (division.parties and count not in division.parties):
        known = " or ".join(map(str, division.parties)) or "1 or more"
        raise InputError(
            Code.CONFIG_INVALID,
            f"parties: {count} cannot share {division.says}. Give {known}.",
        )
    return count


def _active(division: Division, active: int, parties: int) -> int:
    if not 1 <= active <= parties:
        raise InputError(
            Code.CONFIG_INVALID,
            f"active: must be a party's number (got {active}). Give 1 to {parties}.",
        )
    if active != 1 and not division.aligned:
        raise InputError(
            Code.CONFIG_INVALID,
            "active: a party without images has the labels. Leave active out.",
        )
    return active


def _options(dataset: DataSet, chosen: Division, options: Mapping[str, Any]) -> dict[str, Any]:
    reads = {key: how for how, d in dataset.divisions.items() for key in d.settings}
    for key in options:
        if key in reads and key not in chosen.settings:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{key}: only divide = {reads[key]} reads it. Give that too, or leave {key} out.",
            )
        if key not in dataset.options:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{key}: is not a setting of {dataset.title} (got "
                f"{', '.join(dataset.options) or 'no settings'}). Leave it out.",
            )
    return {key: options.get(key, default) for key, (default, _) in dataset.options.items()}


def _share(validation: float) -> float:
    if not 0.0 <= validation < 1.0:
        raise InputError(
            Code.CONFIG_INVALID,
            f"validation: must be at least 0 and less than 1 (got {validation}). Give a share.",
        )
    return validation
