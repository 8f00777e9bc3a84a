"""Whether drift tells an honest party from one that boosts: ``python -m benchmarks.leaks --only
watch --data DIR``.

Credit default with two parties, and breast cancer with three, in split training with SGD and with
Adam. A passive party follows the protocol, or boosts its own gradients
(``benchmarks.boost``) from the beginning or from the middle on. The drift is what the
active party writes into its ``metrics.jsonl``. Rules are compared by what they hit if one honest
run in twenty gives an alarm: with a threshold from honest runs of the same setting, and with one
for all.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import vfl
from benchmarks.boost import Boost
from vfl_common.text import to_json
from vfl_leaks.rehearsal import rehearse
from vfl_party.assembly.party import Assembled

RESULTS = Path(__file__).parent / "results" / "leaks-watch"
GAMMAS = (1.0, 2.0, 5.0)
# Seeds.
HONEST, BOOSTED = 20, 10
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
    "adam": {"kind": "adam", "lr": 0.003},
}
Tables = dict[str, Any]


@dataclass(frozen=True)
class Watched:
    """One run. ``gamma``: 0 if all are honest. ``late``: the boost begins in the middle. ``drift``:
    by round.
    """

    data: str
    optimizer: str
    gamma: float
    late: bool
    seed: int
    attacker: str
    drift: list[dict[str, float]]


def cancer() -> Tables:
    """Returns split training of three parties, with ten columns each."""
    names = ("active", "passive", "passive2")
    source = {"source": "sklearn:breast_cancer"}
    return {
        "name": "watch-cancer",
        "task": {"kind": "binary"},
        "parties": [
            {"name": name, "role": "passive" if name != "active" else "active"} for name in names
        ],
        "rows": {"validation": 0.2, "test": 0.2},
        "model": {
            "embedding_size": 8,
            "encoder": {"kind": "mlp", "hidden": [32]},
            "top": {"hidden": [16]},
        },
        "phases": [{"kind": "splitnn", "epochs": 12, "batch_size": 32}],
        "run": {"checkpoint_every": 100},
        "simulate": {"scheme": "columns", "data": source},
    }


def run(credit: Tables, *, quick: bool, console: Console) -> None:
    """Runs what the results do not have yet; writes after each setting."""
    done = [] if quick else read()
    for data, tables in (("credit", credit), ("cancer", cancer())):
        for name, optimizer in OPTIMIZERS.items():
            phase = tables["phases"][0] | {"optimizer": optimizer}
            made = tables | {"phases": [phase]}
            for gamma, late in (
                (0.0, False),
                *((gamma, late) for late in (False, True) for gamma in GAMMAS),
            ):
                seeds = range(1, 1 + (1 if quick else BOOSTED if gamma else HONEST))
                had = {
                    each.seed
                    for each in done
                    if (each.data, each.optimizer, each.gamma, each.late)
                    == (data, name, gamma, late)
                }
                for seed in [seed for seed in seeds if seed not in had]:
                    done.append(watched(made | {"seed": seed}, data, name, gamma, late))
                console.print(f"{data}, {name}, γ = {gamma:g}{', late' if late else ''}: done")
                if not quick:
                    RESULTS.with_suffix(".json").write_text(
                        to_json({"runs": [asdict(each) for each in done]}) + "\n"
                    )
    table = written(done)
    if not quick:
        RESULTS.with_suffix(".md").write_text(table)
    console.print(table, markup=False)


def watched(tables: Tables, data: str, optimizer: str, gamma: float, late: bool) -> Watched:
    """Runs one federation, and reads its drift."""
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        epochs = tables["phases"][0]["epochs"]

        def attach(party: str, assembled: Assembled) -> None:
            if party != "passive" or not gamma:
                return
            encoder, begun = assembled.party.models["encoder"], list[Boost]()

            def begin() -> None:
                begun.append(Boost(encoder, gamma))
                stack.callback(begun[-1].end)

            if not late:
                begin()
                return
            phase, calls = assembled.phases[0], [0]
            plain = phase.run_round

            def counted(round_: int) -> Any:
                if round_ == epochs // 2:
                    begin()
                calls[0] += 1
                return plain(round_)

            phase.run_round = counted  # type: ignore[method-assign]

        found = rehearse(vfl.Recipe.from_dict(tables), {}, place, attach, quiet=True)
        lines = [
            json.loads(line)
            for line in (found.folder / "active" / "metrics.jsonl").read_text().splitlines()
        ]
        drift = [
            {name: round(value, 5) for name, value in line["drift"].items()}
            for line in lines
            if "drift" in line
        ]
        return Watched(
            data, optimizer, gamma, late, tables["seed"], "passive" if gamma else "", drift
        )


def read() -> list[Watched]:
    """Returns the runs that the results have."""
    path = RESULTS.with_suffix(".json")
    return (
        [Watched(**each) for each in json.loads(path.read_text())["runs"]] if path.exists() else []
    )


Rule = Callable[[list[dict[str, float]], str], float]


def beside_others(drift: list[dict[str, float]], party: str) -> float:
    """A party's drift over the largest of the others', the median of the second half of the
    rounds.
    """
    late = drift[len(drift) // 2 :]
    return statistics.median(
        each[party] / max(value for name, value in each.items() if name != party) for each in late
    )


def own_course(drift: list[dict[str, float]], party: str) -> float:
    """The largest growth of a party's drift from one round to the next, from the third on."""
    own = [each[party] for each in drift]
    return max(after / max(before, 1e-9) for before, after in pairwise(own[1:]))


def level(drift: list[dict[str, float]], party: str) -> float:
    """A party's mean drift in the second half of the rounds."""
    return statistics.fmean(each[party] for each in drift[len(drift) // 2 :])


RULES: dict[str, Rule] = {
    "beside the others": beside_others,
    "its own course": own_course,
    "its level": level,
}


def score(each: Watched, rule: Rule) -> float:
    """Returns what a rule makes of a run: the largest of the passive parties'."""
    return max(rule(each.drift, name) for name in each.drift[0] if name != "active")


def written(done: Sequence[Watched]) -> str:
    """Returns a Markdown table: alarms of honest runs, and hits, by the setting's own threshold and
    by one for all.
    """
    head = ["data", "optimizer", "rule", "threshold", "honest", *(f"γ = {x:g}" for x in GAMMAS)]
    head += [f"from the middle, γ = {x:g}" for x in GAMMAS]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for name, rule in RULES.items():
        common = _threshold([each for each in done if not each.gamma], rule)
        for data, optimizer in dict.fromkeys((each.data, each.optimizer) for each in done):
            runs = [each for each in done if (each.data, each.optimizer) == (data, optimizer)]
            own = _threshold([each for each in runs if not each.gamma], rule)
            groups = [(0.0, False), *((gamma, late) for late in (False, True) for gamma in GAMMAS)]
            cells = []
            for group in groups:
                scores = [score(each, rule) for each in runs if (each.gamma, each.late) == group]
                hits = [sum(value > threshold for value in scores) for threshold in (own, common)]
                cells.append(f"{hits[0]}, {hits[1]} of {len(scores)}")
            lines.append(
                f"| {data} | {optimizer} | {name} | {own:.3g}, {common:.3g} | {' | '.join(cells)} |"
            )
    return "\n".join(lines) + "\n"


def _threshold(honest: Sequence[Watched], rule: Rule) -> float:
    return float(np.quantile([score(each, rule) for each in honest], 0.95))
