"""Folders of finished runs as programs leave them, without training: for pages of reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from vfl_common.config.task import Kind
from vfl_common.summary import (
    Arithmetic,
    ArithmeticChange,
    ByteCount,
    Bytes,
    ExchangeSummary,
    LinkBytes,
    PartySummary,
    PhaseTimes,
    Summary,
)

KINDS: tuple[Kind, ...] = (
    "binary",
    "multiclass",
    "multilabel",
    "regression",
    "survival",
    "ranking",
)
# What nobody should be able to bring into a page.
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "\x1b[31mred\x1b[0m",
    "{{ 7 * 7 }} $\\frac{a}$",
    "x" * 10_000,
)
_METRIC = {"binary": "auc", "multilabel": "auc", "multiclass": "accuracy", "regression": "rmse"}


def predictions(
    kind: Kind, rows: int, seed: int = 0, *, good: float = 1.5, classes: tuple[str, ...] = ()
) -> pa.Table:
    """A phase's kept predictions, half of them of validation rows. ``good``: how well the model
    sees; ``classes``: their names.
    """
    draw, noise = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    splits = ["validation"] * (rows // 2) + ["test"] * (rows - rows // 2)
    ids = [f"id{row:05d}" for row in range(rows)]
    y_N: Any
    columns: dict[str, Any] = {"phase": ["evaluate"] * rows, "split": splits, "id": ids}
    columns["matched_id"] = ids
    if kind == "binary":
        negative, positive = classes or ("no", "yes")
        y_N = draw.random(rows) < 0.3
        p_N = 1 / (1 + np.exp(-(good * (2 * y_N - 1) + noise.normal(0, 1.5, rows))))
        columns["truth"] = [positive if y else negative for y in y_N]
        columns[f"score_{positive}"] = p_N
        columns["class"] = [positive if p > 0.5 else negative for p in p_N]
    elif kind == "multiclass":
        names = classes or ("one", "two", "three")
        y_N = draw.integers(0, len(names), rows)
        logits = good * np.eye(len(names))[y_N] + noise.normal(size=(rows, len(names)))
        p_NC = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        columns["truth"] = [names[y] for y in y_N]
        columns |= {f"score_{name}": p_NC[:, k] for k, name in enumerate(names)}
        columns["class"] = [names[k] for k in p_NC.argmax(axis=1)]
    elif kind == "multilabel":
        names = classes or ("often", "late")
        y_NL = draw.random((rows, len(names))) < 0.4
        p_NL = 1 / (1 + np.exp(-(good * (2 * y_NL - 1) + noise.normal(size=y_NL.shape))))
        columns |= {f"truth_{name}": y_NL[:, k].astype(float) for k, name in enumerate(names)}
        columns |= {f"score_{name}": p_NL[:, k] for k, name in enumerate(names)}
    else:
        y_N = (
            np.ceil(draw.exponential(20, rows)) if kind == "survival" else draw.normal(50, 9, rows)
        )
        said_N = y_N + noise.normal(0, 6 / good, rows)
        columns["truth"] = y_N
        if kind == "regression":
            columns["value"] = said_N
        elif kind == "survival":
            columns |= {"event": (draw.random(rows) < 0.7).astype(float), "risk": -said_N / 20}
        else:
            columns["truth"] = draw.integers(0, 3, rows).astype(float)
            columns |= {"group": [f"q{row // 5}" for row in range(rows)]}
            columns["score"] = columns["truth"] + noise.normal(0, 1 / good, rows)
    return pa.table(columns)


def recipe_of(
    kind: Kind, parties: tuple[str, ...], *, phases: Any = None, seed: int = 0
) -> dict[str, Any]:
    """A recipe as a run records it; the first party is active."""
    task: dict[str, Any] = {"kind": kind}
    task |= (
        {"classes": {"multiclass": 3, "multilabel": 2}[kind]} if kind.startswith("multi") else {}
    )
    roles = [{"name": n, "role": "passive" if at else "active"} for at, n in enumerate(parties)]
    rows = {"validation": 0.2, "test": 0.2} | ({"split": "grouped"} if kind == "ranking" else {})
    found: dict[str, Any] = {"name": "churn", "seed": seed, "task": task, "parties": roles}
    found |= {
        "rows": rows,
        "model": {"embedding_size": 4, "encoder": {"kind": "mlp", "hidden": [4]}},
    }
    return found | {
        "phases": phases
        or [
            {"kind": "splitnn", "epochs": 2, "name": "splitnn"},
            {"kind": "evaluate", "name": "evaluate"},
        ]
    }


def finished_run(
    folder: Path,
    kind: Kind = "binary",
    *,
    rows: int = 200,
    parties: tuple[str, ...] = ("bank", "shop"),
    hostile: bool = False,
    table: pa.Table | None = None,
    recipe: dict[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """A run's folder at the active party's machine, with the folder of its first passive party."""
    classes = HOSTILE[:3] if kind == "multiclass" else HOSTILE[:2] if hostile else ()
    if table is None:
        table = predictions(kind, rows, seed, classes=classes if hostile else ())
    recipe = recipe or recipe_of(kind, parties, seed=seed)
    active = parties[0]
    for name in parties:
        (folder / name).mkdir(parents=True)
        (folder / name / "recipe.json").write_text(json.dumps(recipe))
        (folder / name / "run.json").write_text(
            json.dumps({"run_id": folder.name, "finished": True})
        )
    columns = [*HOSTILE] if hostile else ["income", "visits"]
    profile = [
        {"name": n, "is_number": True, "counts": [1, 0], "edges": [], "words": []} for n in columns
    ]
    for name in parties:
        (folder / name / "profile.json").write_text(json.dumps(profile))
    pyarrow.parquet.write_table(table, folder / active / "predictions.parquet")
    lines = [
        {
            "generation": 1,
            "phase": "splitnn",
            "round": r,
            "rounds": 3,
            "steps": 10 * r,
            "seconds": 1.0 + r,
            "sent_bytes": 100,
            "received_bytes": 200,
            "metrics": {"train": {"loss": 1 / (r + 1)}, "validation": {"auc": 0.6 + 0.1 * r}},
        }
        for r in range(3)
    ]
    (folder / active / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    summary = summary_of(folder.name, parties, kind, words=HOSTILE if hostile else (), seed=seed)
    (folder / "summary.json").write_text(summary.model_dump_json(indent=1))
    return folder


def arithmetic_of(processor: str) -> Arithmetic:
    """What a party computed with, which resumed on this processor."""
    return Arithmetic(
        device="cpu",
        processor=processor,
        instructions="AVX2",
        threads=3,
        libraries={"torch": "2.14.1", "oneDNN": "3.12.0"},
        settings={"MKL_CBWR": "AUTO"},
        changes=[
            ArithmeticChange(checkpoint="000002.splitnn.2", differs=[f"processor: {processor}"])
        ],
    )


def summary_of(
    run_id: str, parties: tuple[str, ...], kind: Kind, *, words: tuple[str, ...] = (), seed: int = 0
) -> Summary:
    """A summary; ``words``: to be its name, method, hardware and exchanges."""
    name, method, hardware, sent = words[:4] or (
        "churn",
        "splitnn",
        "a processor",
        "embedding z float32",
    )
    links = [
        LinkBytes(
            sender=a,
            receiver=b,
            phase="splitnn",
            kind=k,
            payload_bytes=4_000,
            message_bytes=4_100,
            messages=9,
        )
        for passive in parties[1:]
        for a, b, k in ((passive, parties[0], "embedding"), (parties[0], passive, "gradient"))
    ]
    count = ByteCount(payload_bytes=8_000, message_bytes=8_200, messages=18)
    times = [PhaseTimes(phase="splitnn", steps=9, encode_s=0.1, wait_s=0.5, compute_s=1.0)]
    roster = [PartySummary(name="server", role="server", pid=1, device="cpu", version="0.1.0")]
    for at, party in enumerate(parties):
        role: Literal["active", "passive"] = "passive" if at else "active"
        roster.append(
            PartySummary(
                name=party,
                role=role,
                pid=2 + at,
                device="cpu",
                device_name=hardware,
                version="0.1.0",
                steps=30,
                wall_s=2.0,
                rows=600,
                common_rows=400,
                times=times,
                arithmetic=arithmetic_of(hardware),
            )
        )
    exchanges = [
        ExchangeSummary(
            phase="splitnn", exchange=s, sender=a, receiver=b, sent=s, chain=c, when="every step"
        )
        for s, a, b, c in (
            (sent, "passive parties", parties[0], "allow all -> clipped_gaussian -> identity"),
            ("gradient dz float32", parties[0], "passive parties", "allow all -> identity"),
        )
    ]
    return Summary(
        run_id=run_id,
        name=name,
        job="train",
        method=method,
        preset="",
        seed=seed,
        recipe_digest="0" * 64,
        metrics={"test": {"loss": 0.4, "accuracy": 0.9, _METRIC.get(kind, "loss"): 0.9}},
        steps=30,
        wall_s=2.5,
        bytes=Bytes(total=count, by_phase={"splitnn": count}, by_link=links, tcp=[], agrees=True),
        parties=roster,
        exchanges=exchanges if len(parties) > 1 else [],
    )
