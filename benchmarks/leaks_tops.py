"""What FedHSSL's shared tops tell of the rows behind them: ``python -m benchmarks.leaks --only tops
--data DIR``.

MNIST in halves, two parties with a small CNN each, so a peer has the other's own weights. Fewer
rows and more rounds than elsewhere, because weights tell more of rows that are seen often. The
active party adds ISO (Eq. 7) of λp to its top. A head on the uploaded representations says what
that costs. The attacks are ``tops`` (a peer) and ``uploads`` (the server).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import vfl
from benchmarks.ssl import CROSS, DIGITS, HEAD, halves
from benchmarks.studies import EVALUATE, Tables
from vfl_common.text import to_json
from vfl_leaks.result import AttackLine, Rehearsed, as_json

RESULTS = Path(__file__).parent / "results" / "leaks-tops"
ROWS, ALIGNED, ROUNDS, BATCH = 1000, 0.2, 20, 64
# With 5, two parties diverge to NaN in round 20.
LAMBDAS = (0.0, 0.1, 1.0)


def recipe(data: Path, lambda_p: float, rounds: int) -> Tables:
    """Returns pretraining with ISO of ``lambda_p`` on the active party's top, then a head on frozen
    encoders.
    """
    made = halves(data.resolve(), data)
    made["model"]["encoder"] |= {"shared": "blocks"}
    made["simulate"]["data"] |= {"limit": ROWS}
    digits = {name: value for name, value in DIGITS.items() if name != "queue"}
    cross: Tables = {"cross_epochs": CROSS["simsiam"].epochs, "gamma": CROSS["simsiam"].gamma}
    phase = {
        "kind": "fedhssl",
        "ssl": "simsiam",
        **digits,
        **cross,
        "rounds": rounds,
        "batch_size": BATCH,
    }
    phases = [phase | {"iso_weights": lambda_p}, HEAD | {"own_encoder": "trained"}, EVALUATE]
    name = f"leaks-tops-{lambda_p:g}"
    return made | {"name": name, "rows": made["rows"] | {"aligned": ALIGNED}, "phases": phases}


def run(data: Path, seeds: Sequence[int], *, quick: bool, console: Console) -> None:
    """Runs pretraining with each λp and each seed, and writes after each λp."""
    found: dict[float, Rehearsed] = {}
    for lambda_p in LAMBDAS[:1] if quick else LAMBDAS:
        made = recipe(data, lambda_p, 2 if quick else ROUNDS)
        (found[lambda_p],) = vfl.leaks(
            made, attacks=["tops", "uploads"], seeds=[*seeds], quiet=True
        ).found
        console.print(f"λp = {lambda_p:g}: {found[lambda_p].metric} {found[lambda_p].utility}")
        if not quick:
            RESULTS.with_suffix(".json").write_text(to_json(as_json([*found.values()])) + "\n")
            RESULTS.with_suffix(".md").write_text(written(found))
    console.print(written(found), markup=False)


def written(found: Mapping[float, Rehearsed]) -> str:
    """Returns a Markdown table: a line an attacker and victim, a column a λp; AUC, and the 95 %
    quantile of chance.
    """
    keys = list(
        dict.fromkeys(
            (each.attacker, each.of, each.knows) for one in found.values() for each in one.lines
        )
    )
    metric = next(each.metric for each in found.values())
    heads = [f"λp = {lambda_p:g}" for lambda_p in found]
    lines = [
        "| attacker | knows | of | " + " | ".join(heads) + " | beside it, λp = 0 | chance, 95 % |",
        "| --- " * (5 + len(heads)) + "|",
        f"| | | {metric} of a head | "
        + " | ".join(str(each.utility) for each in found.values())
        + " | | |",
    ]
    for key in keys:
        of_key: list[AttackLine | None] = [_line(each, key) for each in found.values()]
        first = next(each for each in of_key if each is not None)
        cells: list[Any] = ["" if each is None else each.value for each in of_key]
        beside = ", ".join(f"{name} {spread}" for name, spread in first.baselines.items())
        attacker, of, knows = key
        shown = (attacker, knows, of, *cells, beside, first.chance_high)
        lines.append("| " + " | ".join(map(str, shown)) + " |")
    notes = dict.fromkeys(note for each in found.values() for note in each.notes if "rank" in note)
    return "\n".join([*lines, "", *(f"- {note}" for note in notes), ""])


def _line(found: Rehearsed, key: tuple[str, str, str]) -> AttackLine | None:
    return next((each for each in found.lines if (each.attacker, each.of, each.knows) == key), None)
