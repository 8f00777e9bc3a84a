"""Says which lines of a table the product refuses, before anything is run."""

from __future__ import annotations

import vfl
from benchmarks.papers.describe import Scale, Table, Tables, resolved, run_at
from benchmarks.papers.plan import Planned, Variant, base_recipe, methods, variants, without_data
from vfl_common.errors import InputError


class UnexpectedError(Exception):
    """A line is refused although its file says that the product lacks nothing for it."""


def refused(table: Table, variant: Variant, scale: Scale, given: Tables) -> dict[str, str]:
    """Returns {line: why its recipe is refused} of the lines of a variant.

    ``given``: parties, rows and simulate of the variant's data. Raises UnexpectedError if neither
    the line nor its column says what it needs.
    """
    folds = resolved(table.folds, scale)
    base = base_recipe("check", variant, scale, given, folds=folds is not None)
    if folds is not None:
        base["rows"] = {k: v for k, v in base["rows"].items() if k != "test"}
        base["rows"] |= {"folds": folds, "fold": 1}
    found: dict[str, str] = {}
    planned = methods(table, variant, scale)
    for each in planned:
        why = _why(base, each, planned, variant.data.metric)
        needs = table.needs or variant.data.needs or variant.first.needs or each.line.needs
        if why is not None and not needs:
            raise UnexpectedError(f"{variant.data.name}, {each.line.name}: {why}")
        if why is not None:
            found[each.line.name] = f"{needs} ({why})"
    # A line goes with the one whose pretraining it shares.
    for line in table.lines:
        if line.pretrain_of in found:
            found[line.name] = found[line.pretrain_of]
    return found


def _why(base: Tables, method: Planned, others: list[Planned], metric: str) -> str | None:
    """Returns why one of a method's two recipes is refused, or has no such metric, or None."""
    from vfl_party.models import check_encoder, check_top
    from vfl_party.phases.course import Course

    tables, first = method.tables, method.tables.get("pretrain")
    if "pretrain_of" in tables:
        first = next(e.tables["pretrain"] for e in others if e.name == tables["pretrain_of"])
    try:
        made = vfl.Recipe.from_dict(base).replace(tables.get("overrides", {}))
        start = {"start": {"run": "before", "phases": first}} if first else {}
        for stage in ([{"phases": first}] if first else []) + [
            {"phases": tables["finetune"], **start}
        ]:
            settings = made.replace(stage).settings
            # A kind that nobody knows might be a plug-in's.
            check_encoder(settings.model.encoder, "model.encoder")
            check_top(settings.model.top)
            if metric not in settings.task.all_metrics:
                return f"the task has no metric {metric!r}"
            course = Course(settings)
            for phase in course.phases:
                # Reads them, so that a key that nobody knows is refused.
                _ = phase.settings
            course.check()
    except InputError as error:
        return str(error)
    return None


def refused_without_data(table: Table, scale: Scale) -> dict[str, str]:
    """Returns the refused lines of all data sets, of which none need be there."""
    found: dict[str, str] = {}
    table = run_at(table, scale)
    if table.compute is None:
        for each in variants(table):
            found |= refused(table, each, scale, without_data(each))
    return found
