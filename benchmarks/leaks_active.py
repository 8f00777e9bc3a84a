"""Active completion on credit default: ``python -m benchmarks.leaks --only active --data DIR``.

The passive party boosts its own gradients (``benchmarks.boost``) in split training with
SGD and with Adam, or it does not. What a head with 80 labels on its encoder finds, and what the
boost takes from the task, stands beside how far its embeddings move from round to round, which the
active party sees.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import vfl
from benchmarks.boost import Boost, drift
from vfl_common.text import to_json
from vfl_leaks.attacks import completion
from vfl_leaks.rehearsal import Rehearsal, rehearse
from vfl_leaks.result import Spread
from vfl_party.assembly.party import Assembled
from vfl_party.base.statistics import auc

RESULTS = Path(__file__).parent / "results" / "leaks-active"
ATTACKER = "passive"
GAMMAS = (0.0, 1.0)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
    "adam": {"kind": "adam", "lr": 0.003},
}


@dataclass(frozen=True)
class Boosted:
    """One run. ``recovered``: {attack: AUC}; ``without``: baselines; ``drift``: of each round but
    the first.
    """

    optimizer: str
    gamma: float
    seed: int
    main: float
    recovered: dict[str, float]
    without: dict[str, float]
    drift: list[float]


def run(recipe: dict[str, Any], seeds: Sequence[int], *, quick: bool, console: Console) -> None:
    """Runs split training of ``recipe`` with each optimizer, with and without boost; writes after
    each run.
    """
    done: list[Boosted] = []
    # {seed: the baselines}, which no run changes.
    beside: dict[int, dict[str, float]] = {}
    for seed in seeds:
        for name, optimizer in OPTIMIZERS.items():
            for gamma in GAMMAS:
                phase = recipe["phases"][0] | {"optimizer": optimizer}
                tables = recipe | {"seed": seed, "phases": [phase, *recipe["phases"][1:]]}
                done.append(_boosted(tables, name, gamma, seed, beside))
                console.print(f"{name}, γ = {gamma:g}, seed {seed}: main {done[-1].main:.3f}")
                if not quick:
                    RESULTS.with_suffix(".json").write_text(
                        to_json({"runs": [asdict(each) for each in done]}) + "\n"
                    )
                    RESULTS.with_suffix(".md").write_text(written(done))
    console.print(written(done), markup=False)


def _boosted(
    tables: dict[str, Any], name: str, gamma: float, seed: int, beside: dict[int, dict[str, float]]
) -> Boosted:
    with contextlib.ExitStack() as stack:
        place, record = (Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2))
        rehearsal = Rehearsal(record)

        def attach(party: str, assembled: Assembled) -> None:
            rehearsal.attach(party, assembled)
            if party == ATTACKER and gamma:
                stack.callback(Boost(assembled.party.models["encoder"], gamma).end)

        found = rehearse(vfl.Recipe.from_dict(tables), {}, place, attach, quiet=True)
        scene = rehearsal.scene(ATTACKER, seed)
        truth = scene.labels[scene.rows["test"]].numpy() == 1

        def aucs(attack: Any) -> dict[str, float]:
            return {
                name: auc((each[:, 1] - each[:, 0]).numpy(), truth)
                for name, each in attack(scene).items()
            }

        if seed not in beside:
            beside[seed] = aucs(completion.compute_baselines)
        seen = rehearsal.scene("active", seed).embeddings[ATTACKER]
        moved = [*drift(batch for batch in seen() if batch.phase == "splitnn")]
        main = found.metrics["test"]["auc"]
        return Boosted(
            name, gamma, seed, main, aucs(completion.recover_labels), beside[seed], moved
        )


def written(done: Sequence[Boosted]) -> str:
    """Returns a Markdown table: means over seeds; the first drift, and the mean of the second
    half.
    """
    attacks = list(dict.fromkeys(name for each in done for name in each.recovered))
    head = ["optimizer", "γ", "main AUC", *attacks, "drift, first", "drift, second half"]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for name in OPTIMIZERS:
        for gamma in GAMMAS:
            runs = [each for each in done if (each.optimizer, each.gamma) == (name, gamma)]
            if runs:
                cells: list[Any] = [name, f"{gamma:g}", Spread.of(each.main for each in runs)]
                cells += [Spread.of(each.recovered[attack] for each in runs) for attack in attacks]
                cells += [Spread.of(each.drift[0] for each in runs)]
                cells += [
                    Spread.of(statistics.fmean(each.drift[len(each.drift) // 2 :]) for each in runs)
                ]
                lines.append("| " + " | ".join(map(str, cells)) + " |")
    names = list(dict.fromkeys(name for each in done for name in each.without))
    beside = {each.seed: each for each in done}.values()
    shown = ", ".join(
        f"{name} {Spread.of(each.without[name] for each in beside)}" for name in names
    )
    return "\n".join([*lines, f"\nWithout any message: {shown}."]) + "\n"
