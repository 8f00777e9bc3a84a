"""A recipe whose parties match rows by keys or by fuzzy linkage."""

from __future__ import annotations

from typing import Any

import vfl


def make_recipe(parties: tuple[str, ...], rows: dict[str, Any]) -> vfl.Recipe:
    """Returns a recipe with two epochs of split training. The first party is active."""
    return vfl.Recipe.from_dict(
        {
            "name": "matched",
            "task": {"kind": "binary"},
            "parties": [
                {"name": name, "role": "passive" if number else "active"}
                for number, name in enumerate(parties)
            ],
            "rows": rows,
            "model": {"embedding_size": 4, "encoder": {"kind": "mlp", "hidden": [6]}},
            "phases": [
                {"kind": "splitnn", "epochs": 2, "batch_size": 16},
                {"kind": "evaluate"},
            ],
        }
    )
