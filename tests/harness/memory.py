"""Runs a federation of a test in the test's own process, which computes what processes compute
(test_in_process.py).
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.harness.errors import assert_names
from tests.harness.federation import Federation
from vfl.simulation.inprocess import run_in_process
from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import VflError
from vfl_common.summary import Summary
from vfl_party.assembly.models import encoder_settings
from vfl_party.assembly.party import Assembled
from vfl_party.assembly.trial import try_party
from vfl_party.base.checkpoint import CheckpointStore


def in_process(folder: Path, tables: dict[str, Any], data: dict[str, Any], **more: Any) -> Summary:
    """Runs the recipe ``tables``; ``folder``: of the run."""
    recipe = Recipe.model_validate({"simulate": {}} | tables)
    return run_in_process(
        recipe, {name: DataSettings(**each) for name, each in data.items()}, folder, **more
    )


def run_here(
    folder: Path, tables: dict[str, Any], data: dict[str, Any]
) -> tuple[dict[str, Any], Federation]:
    """Runs it to its end in ``folder``; returns its summary, and where to look for all else that
    the run has left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Data may be named relative to it.
    with contextlib.chdir(folder):
        in_process(folder / "runs" / "here", tables, data)
    found = Federation(folder, tables, data)
    return json.loads((found.run_folder / "summary.json").read_text()), found


def parameters(folder: Path) -> dict[str, Tensor]:
    """All weights and buffers of a party's newest checkpoint."""
    store = CheckpointStore(folder / "checkpoints", 2)
    models = store.load(store.labels()[-1])["job"]["models"]
    return {
        f"{model}.{key}": value for model, state in models.items() for key, value in state.items()
    }


def in_memory(
    folder: Path, tables: dict[str, Any], data: dict[str, Any]
) -> dict[str, dict[str, Tensor]]:
    """{party: its weights and buffers} after a run."""
    in_process(folder / "run", tables, data)
    return {name: parameters(folder / "run" / name) for name in data}


def assembled(tables: dict[str, Any], name: str, data: dict[str, Any]) -> Assembled:
    """Makes a party as ``vfl-party check`` does, and as ``vfl-party run`` does before it joins."""
    recipe = parse(Recipe, tables, "recipe.toml")
    settings = parse(DataSettings, data, f"{name}.toml: data")
    return try_party(recipe, name, settings, encoder_settings(recipe, name, None))


def refused_here(tables: dict[str, Any], name: str, data: dict[str, Any], *names: str) -> str:
    """Expects that a party is refused before it joins; returns the sentence.

    Args:
        tables: the recipe.
        name: the party.
        data: its table ``data``.
        names: what the sentence names: files, keys, parties, values.
    """
    with pytest.raises(VflError) as caught:
        assembled(tables, name, data)
    sentence = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in sentence
    assert_names(sentence, *names)
    return sentence
