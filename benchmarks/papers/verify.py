"""Computes the verdicts of a result file again, from the file alone, and compares them.

    python -m benchmarks.papers.verify FILE...

It shares no code with ``benchmarks.papers.rules``: the tests are scipy's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

_ALPHA = 0.05


def differences(path: Path) -> list[str]:
    """Returns a line for each verdict of a file that another computation does not find.

    It checks the verdicts, not the runs: values and data sets are taken from the file.
    """
    kept = json.loads(path.read_text())
    cells = {(e["data"], e["line"], e["column"]): e["values"] for e in kept["cells"]}
    claims = kept["claims"] if kept.get("claims") else []
    found = [_judge(each, cells) for each in claims]
    tested = [at for at, (_, p) in enumerate(found) if p is not None]
    corrected = dict(zip(tested, _holm([found[at][1] for at in tested]), strict=True))
    wrong = []
    for at, (each, (verdict, _)) in enumerate(zip(claims, found, strict=True)):
        # A p-value that is not a number decides nothing.
        if at in corrected and not corrected[at] <= _ALPHA:
            verdict = "undecided"
        if verdict != each["verdict"]:
            wrong.append(f"{each['data']}: {each['says']}: {each['verdict']}, here {verdict}")
    return wrong


def count(path: Path) -> int:
    """Returns the number of verdicts in a file, including *not run*."""
    return len(json.loads(path.read_text()).get("claims", []))


def _judge(claim: dict[str, Any], cells: dict[Any, list[float]]) -> tuple[str, float | None]:
    test, runs = claim["test"], claim["runs"]
    if test is None:
        return "not run", None
    sides = []
    for each in test["comparisons"]:
        both = [
            np.array([cells.get((claim["data"], *cell), []) for cell in side], dtype=object)
            for side in (each["firsts"], each["seconds"])
        ]
        if any(len(values) != runs for side in both for values in side):
            return "not run", None
        sides.append([each["sign"] * np.array(side.tolist(), dtype=float) for side in both])
    if test["kind"] == "below":
        ours = np.mean([a.max(axis=0) for a, _ in sides], axis=0)
        gaps = test["limit"] - ours
    elif test["kind"] == "ratio":
        gaps = np.mean(
            [np.log(np.abs(a).max(axis=0) / np.abs(b).max(axis=0)) for a, b in sides], axis=0
        ) - np.log(test["limit"])
    else:
        gaps = np.mean([a.max(axis=0) - b.max(axis=0) for a, b in sides], axis=0)
    if test["counted"]:
        return ("holds" if gaps.mean() >= 0 else "contradicted"), None
    untrained = test["level"] is not None and all(
        values.mean() <= each["sign"] * test["level"]
        for each, pair in zip(test["comparisons"], sides, strict=True)
        for side in pair
        for values in side
    )
    if len(gaps) < 2 or untrained:
        return "undecided", None
    return _tested(test, gaps)


def _tested(test: dict[str, Any], gaps: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[str, float]:
    limit, same = test["limit"], bool(np.ptp(gaps) < 1e-12)
    if same:
        # Student's test has no spread to divide by.
        inside = -limit < gaps[0] and (test["one_sided"] or gaps[0] < limit)
        if test["kind"] == "equivalence":
            return ("holds" if inside else "contradicted"), 0.0
        p = 0.0 if abs(gaps[0]) > 1e-12 else 1.0
    elif test["kind"] == "equivalence":
        low = stats.ttest_1samp(gaps, -limit, alternative="greater").pvalue
        high = stats.ttest_1samp(gaps, limit, alternative="less").pvalue
        if test["one_sided"]:
            inside_p, outside = low, 1 - low
        else:
            inside_p, outside = max(low, high), 2 * min(1 - low, 1 - high)
        return ("holds", inside_p) if inside_p <= outside else ("contradicted", min(1.0, outside))
    else:
        p = stats.ttest_1samp(gaps, 0.0).pvalue
    if test["kind"] in ("difference", "best") and abs(gaps.mean()) < limit:
        return "undecided", p
    return ("holds" if gaps.mean() > 0 else "contradicted"), p


def _holm(p_values: Sequence[float | None]) -> list[float]:
    values = np.array(p_values, dtype=float)
    if not len(values):
        return []
    order = np.argsort(values, kind="stable")
    steps = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1))
    corrected = np.empty(len(values))
    corrected[order] = np.minimum(1.0, steps)
    return [float(each) for each in corrected]


def main() -> None:
    """Compares the files that are named on the command line; exits with 1 if a verdict differs or
    a file has none.
    """
    names = sys.argv[1:]
    if not names or names[0].startswith("-"):
        sys.exit(__doc__)
    failed = False
    for name in names:
        try:
            wrong, number = differences(Path(name)), count(Path(name))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            wrong, number = [f"is not a result file ({type(error).__name__}: {error})"], 0
        failed |= bool(wrong) or not number
        state = "; ".join(wrong) or ("equal" if number else "the file has no verdicts")
        print(f"{name}: {number} verdicts: {state}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
