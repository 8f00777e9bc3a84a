"""Recipes and data of the integration tests: small enough that a run takes about a second."""

from __future__ import annotations

from typing import Any

ACTIVE = "p0"


def digits(parties: int, *, limit: int = 100) -> dict[str, dict[str, Any]]:
    """Divides scikit-learn's digits into halves or quadrants; p0 has the labels too. {party: its
    [data] table}.
    """
    scheme = {2: "halves", 4: "quadrants"}[parties]
    tables: dict[str, dict[str, Any]] = {
        f"p{part}": {
            "source": "sklearn:digits",
            "limit": limit,
            "view": {"scheme": scheme, "part": part, "parts": parties},
        }
        for part in range(parties)
    }
    tables[ACTIVE]["label"] = "target"
    return tables


def columns(
    source: str, parts: int, *, limit: int, active_features: bool = True
) -> dict[str, dict[str, Any]]:
    """Divides a table by columns; p0 has the labels, and features unless ``parts`` passive parties
    have them all.
    """
    first = 0 if active_features else 1
    tables: dict[str, dict[str, Any]] = {
        f"p{first + part}": {
            "source": source,
            "limit": limit,
            "view": {"scheme": "columns", "part": part, "parts": parts},
        }
        for part in range(parts)
    }
    tables.setdefault(ACTIVE, {"source": source, "limit": limit})
    tables[ACTIVE]["label"] = "target"
    return {name: tables[name] for name in sorted(tables)}


def recipe(
    parties: int,
    *,
    seed: int = 7,
    task: dict[str, Any] | None = None,
    active_features: bool = True,
    model: dict[str, Any] | None = None,
    phase: dict[str, Any] | None = None,
    rows: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Makes a recipe: three epochs of split training of digits on an 8-wide embedding; every table
    can be changed.
    """
    roster: list[dict[str, Any]] = [{"name": ACTIVE, "role": "active", "features": active_features}]
    roster += [{"name": f"p{number}", "role": "passive"} for number in range(1, parties)]
    return {
        "name": "case",
        "seed": seed,
        "task": task or {"kind": "multiclass", "classes": 10},
        "parties": roster,
        "rows": {"validation": 0.1, "test": 0.1} | (rows or {}),
        "model": {"embedding_size": 8} | (model or {}),
        "phases": [{"kind": "splitnn", "epochs": 3, "batch_size": 24} | (phase or {})],
        "run": {"heartbeat_s": 0.5, "rejoin_deadline_s": 30.0} | (run or {}),
    }


MOCO: dict[str, Any] = {
    "kind": "mocosfl",
    "image": [1, 8, 8],
    "cut": 1,
    "epochs": 3,
    "batch_size": 8,
    "queue": 40,
    "width": 12,
    "momentum": 0.9,
    "temperature": 0.2,
    "optimizer": {
        "kind": "sgd",
        "lr": 0.05,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "schedule": "cosine",
    },
    "augment": {"crop_scale": [0.5, 1.0], "flip": 0.0, "jitter": 0.0, "grayscale": 0.0},
}
PROBE: dict[str, Any] = {"kind": "probe", "epochs": 5, "least_steps": 1, "neighbours": 10}


def own_rows_recipe(
    clients: int, *, preset: str = "paper", then: tuple[dict[str, Any], ...] = (), **more: Any
) -> dict[str, Any]:
    tables = recipe(clients + 1, active_features=False, rows={"align": "none"})
    model = {"embedding_size": 8, "encoder": {"kind": "cnn", "channels": [4, 8]}}
    return tables | {"preset": preset, "model": model, "phases": [MOCO | more, *then]}


def own_rows(clients: int, limit: int = 120) -> dict[str, dict[str, Any]]:
    """Every client has every n-th of the digits; p0 has the labels of all."""
    whole = {"source": "sklearn:digits", "limit": limit, "scale": "minmax"}
    found: dict[str, dict[str, Any]] = {"p0": whole | {"label": "target", "columns": []}}
    for part in range(clients):
        found[f"p{part + 1}"] = whole | {"view": {"scheme": "rows", "part": part, "parts": clients}}
    return found
