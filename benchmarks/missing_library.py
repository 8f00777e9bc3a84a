"""What the library itself reaches when parties are missing in the test, and what it promises for
each set of parties; see ``benchmarks.missing``.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import vfl
from benchmarks.missing_rows import BATCH, DROPOUT, LR, TEMPERATURE, TOP, WIDTH, Mask
from benchmarks.missing_tasks import ACTIVE, TEST, Setting
from vfl_party.base.seeds import Rows
from vfl_party.models.metrics import evaluate

Found = dict[str, Any]
TRAINING = {"batch_size": BATCH, "optimizer": {"kind": "adam", "lr": LR}}
# {way: (rule, keys of the phase)}. A plain model is scored with zeros by the policy; nobody is late.
WAYS: dict[str, tuple[str, Found]] = {
    "plain, zeros": ("mean", {"late_policy": "zeros", "deadline_s": 500.0}),
    "party dropout": ("concat", {"party_dropout": DROPOUT}),
    "subsets": ("mean", {"subsets": True}),
}
# Those that have learnt to do without a party, and so promise a quality without it.
LEARNT = ("party dropout", "subsets")


def measured(
    setting: Setting, fresh: Setting, test: Rows, masks: Sequence[Mask], seed: int, epochs: int
) -> Found:
    """Trains each way with all rows.

    Args:
        fresh: rows of the task that no run sees.
        test: the run's test rows.
        masks: which passive parties take part in each of them, [n, P] each.

    Returns {"test": {way: [quality for each of ``masks``]}, "sets": {way: {set of parties:
    [promised, found on fresh rows]}}, "rows": [test, fresh]}.
    """
    found: Found = {"test": {}, "sets": {}, "rows": [len(test), len(fresh.y)]}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            run = vfl.simulate(
                _recipe(setting, way, seed, epochs), data_of(setting), out=folder, quiet=True
            )
            of_test = _outputs(run, setting.of(test))
            together = _quality(setting.of(test), of_test[frozenset(setting.passives)])
            # The same rows as the run's own.
            np.testing.assert_allclose(together, run.metrics["test"][setting.metric], atol=1e-4)
            found["test"][way] = [
                _quality(setting.of(test), _mixed(setting, of_test, mask)) for mask in masks
            ]
            if way in LEARNT:
                of_fresh = _outputs(run, fresh)
                found["sets"][way] = _promises(run, fresh, of_fresh)
            else:
                for who in ("student", "alone"):
                    quality = run.metrics[f"test {who}"][setting.metric]
                    found["test"][who] = [quality] * len(masks)
    return found


def _recipe(setting: Setting, way: str, seed: int, epochs: int) -> Found:
    rule, keys = WAYS[way]
    top = {"hidden": [TOP]}
    student = {"kind": "student", "epochs": epochs, "temperature": TEMPERATURE, "alone": True}
    more = [] if way in LEARNT else [student | TRAINING | {"top": top, "splits": ["test"]}]
    worth = {"subsets": True, "metric": setting.metric, "resamples": 2} if way in LEARNT else {}
    return {
        "name": "missing",
        "seed": seed,
        "task": setting.task.model_dump(exclude_defaults=True),
        "parties": [
            {"name": name, "role": "active" if name == ACTIVE else "passive"}
            for name in setting.columns
        ],
        "rows": {"validation": 0.0, "test": TEST},
        "model": {
            "combine": rule,
            "embedding_size": WIDTH,
            "encoder": {"kind": "mlp", "hidden": [setting.hidden]},
            "top": top,
        },
        "phases": [
            {"kind": "splitnn", "epochs": epochs} | TRAINING | keys,
            *more,
            {"kind": "evaluate", "splits": ["test"]} | worth,
        ],
    }


def data_of(setting: Setting, *, label: bool = True) -> Found:
    ids = np.array([f"{row:06}" for row in range(len(setting.y))])
    found = {}
    for name, columns in setting.columns.items():
        frame: Found = {"id": ids} | {f"{name}c{n}": x for n, x in enumerate(columns.T)}
        own = label and name == ACTIVE
        frame |= {"y": setting.y} if own else {}
        settings = {"scale": setting.scale}
        found[name] = vfl.Data(frame, id="id", label="y" if own else None, settings=settings)
    return found


def _outputs(run: vfl.Run, rows: Setting) -> dict[frozenset[str], Tensor]:
    """Returns {passive parties that take part: outputs [n, O]}."""
    found: dict[frozenset[str], Tensor] = {}
    data = {name: each.frame for name, each in data_of(rows, label=False).items()}
    for count in range(len(rows.passives) + 1):
        for away in itertools.combinations(rows.passives, count):
            given = {name: each for name, each in data.items() if name not in away}
            columns = run.predict(given, without=away)
            scores = np.stack(
                [np.array(x) for name, x in columns.items() if name.startswith("score_")], axis=1
            )
            # Whatever is larger where the probability is: 0 divides two classes.
            values = scores - 0.5 if rows.task.kind == "binary" else np.log(scores + 1e-30)
            found[frozenset(rows.passives) - set(away)] = torch.from_numpy(values)
    return found


def _mixed(setting: Setting, outputs: dict[frozenset[str], Tensor], mask: Mask) -> Tensor:
    sets = [frozenset(itertools.compress(setting.passives, there)) for there in mask.tolist()]
    return torch.stack([outputs[each][row] for row, each in enumerate(sets)])


def _quality(setting: Setting, outputs: Tensor) -> float:
    y = torch.from_numpy(setting.y)
    y = y if setting.task.kind == "multiclass" else y[:, None].float()
    return evaluate(setting.task, outputs, y)[setting.metric]


def _promises(
    run: vfl.Run, fresh: Setting, outputs: dict[frozenset[str], Tensor]
) -> dict[str, list[float]]:
    """Returns {set of parties: [promised, found on fresh rows]}."""
    worth = run.summary.worth
    assert worth is not None
    return {
        " ".join(each.parties): [
            each.test,
            _quality(fresh, outputs[frozenset(each.parties) - {ACTIVE}]),
        ]
        for each in worth.subsets
        if ACTIVE in each.parties and each.test is not None
    }
