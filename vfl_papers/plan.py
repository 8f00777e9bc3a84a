"""Checks the arguments of ``vfl prepare`` against the data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vfl_common.errors import Code, InputError
from vfl_papers.dataset import DataSet, Division, PaperUse, Request


@dataclass(frozen=True)
class PreparePlan:
    """The checked arguments of ``vfl prepare``, with defaults filled in.

    Args:
        name: The name of the data set.
        dataset: The description of the data set.
        use: The paper's use of the data set, which provides the defaults.
        division: The way to divide the data set among the parties.
        request: The number of parties, seed and settings for the division.
        validation: The share of the training rows for validation.
        numbers: The paper's use whose hyperparameters the recipe gets; None if no paper uses a
            division like this one.
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
    """Checks the arguments of ``vfl.prepare``, and fills in the paper's values as defaults. Raises
    InputError if an argument does not fit the data set.
    """
    use = _choose_use(dataset, paper, divide)
    division = _choose_division(dataset, use, divide)
    count = _choose_party_count(division, use, parties)
    request = Request(
        count,
        _check_active(division, active, count),
        seed,
        deal or use.deal,
        _fill_options(dataset, division, options),
    )
    if deal is not None and division.aligned:
        raise InputError(
            Code.CONFIG_INVALID,
            "deal: needs a division by rows, but this division gives all parties the same rows. "
            "Give divide = rows, or leave deal out.",
        )
    share = use.validation if validation is None else validation
    matching_uses = (
        paper_use
        for paper_use in (use, *dataset.uses)
        if dataset.divisions[paper_use.division].aligned == division.aligned
    )
    return PreparePlan(
        name, dataset, use, division, request, _check_share(share), next(matching_uses, None)
    )


def _choose_use(dataset: DataSet, paper: str | None, divide: str | None) -> PaperUse:
    if paper is None:
        return next((use for use in dataset.uses if use.division == divide), dataset.uses[0])
    papers = {use.paper.lower().replace("-", ""): use for use in dataset.uses}
    use = papers.get(paper.lower().replace("-", ""))
    if use is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"paper: {paper!r} has no experiment with {dataset.title}. Choose one of "
            f"{', '.join(paper_use.paper for paper_use in dataset.uses)}, or leave it out.",
        )
    return use


def _choose_division(dataset: DataSet, use: PaperUse, divide: str | None) -> Division:
    division = dataset.divisions.get(divide or use.division)
    if division is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"divide: {dataset.title} cannot be divided by {divide!r}. Choose one of "
            f"{', '.join(dataset.divisions)}.",
        )
    return division


def _choose_party_count(division: Division, use: PaperUse, parties: int | None) -> int:
    fits = not division.parties or use.parties in division.parties
    count = parties or (use.parties if fits else division.parties[0])
    if count < 1 or (division.parties and count not in division.parties):
        possible = " or ".join(map(str, division.parties)) or "1 or more"
        raise InputError(
            Code.CONFIG_INVALID,
            f"parties: this division is not possible among {count} parties. Give {possible}.",
        )
    return count


def _check_active(division: Division, active: int, parties: int) -> int:
    if not 1 <= active <= parties:
        raise InputError(
            Code.CONFIG_INVALID,
            f"active: must be a party's number (got {active}). Give 1 to {parties}.",
        )
    if active != 1 and not division.aligned:
        raise InputError(
            Code.CONFIG_INVALID,
            "active: cannot be set with this division, because the party with the labels has no "
            "images. Leave active out.",
        )
    return active


def _fill_options(
    dataset: DataSet, division: Division, options: Mapping[str, Any]
) -> dict[str, Any]:
    division_of = {key: how for how, d in dataset.divisions.items() for key in d.settings}
    for key in options:
        if key in division_of and key not in division.settings:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{key}: applies only with divide = {division_of[key]}. Set that, or leave {key} "
                "out.",
            )
        if key not in dataset.options:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{key}: is not a setting of {dataset.title} (settings: "
                f"{', '.join(dataset.options) or 'none'}). Leave it out.",
            )
    return {key: options.get(key, default) for key, (default, _) in dataset.options.items()}


def _check_share(validation: float) -> float:
    if not 0.0 <= validation < 1.0:
        raise InputError(
            Code.CONFIG_INVALID,
            f"validation: must be at least 0 and less than 1 (got {validation}). Correct it.",
        )
    return validation
