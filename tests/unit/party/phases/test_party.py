"""The interfaces of a party and of a method: their sizes, their modules and their old names."""

from __future__ import annotations

import ast
from dataclasses import fields
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vfl_party.phases
from tests.harness import cases
from vfl_common.config.recipe import Recipe
from vfl_party.data import Features
from vfl_party.methods.fedonce import METHOD as FEDONCE
from vfl_party.methods.splitnn import METHOD, SplitNN
from vfl_party.phases.context import Party
from vfl_party.phases.course import Course
from vfl_party.phases.method import Method, MethodFacts, get_facts, list_idle
from vfl_party.phases.rows import PartyData

RECIPE = Recipe.model_validate(cases.recipe(2))
ROWS = np.arange(6, dtype=np.int64)


def make_party(name: str = "p1") -> Party:
    data = PartyData({"train": ROWS, "all": ROWS}, Features(torch.ones(6, 3)))
    encoder = torch.nn.Linear(3, 8)
    return Party(name, Course(RECIPE), torch.device("cpu"), {"encoder": encoder}, data)


def list_members(owner: object) -> list[str]:
    """Returns the public attributes, properties and methods of an object or a class."""
    return [name for name in dir(owner) if not name.startswith("_")]


def test_no_modules_of_phases_import_each_other() -> None:
    """Imports for types count as well, because a reader must follow them too."""
    package = vfl_party.phases.__name__
    folder = Path(vfl_party.phases.__path__[0])
    modules = {f"{package}.{path.stem}": path for path in folder.glob("*.py")}
    imports: dict[str, set[str]] = {}
    for name, path in modules.items():
        named: set[str | None] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
        imports[name] = {found for found in named if found in modules}
    assert imports[f"{package}.course"] >= {f"{package}.context", f"{package}.method"}
    # A cycle raises CycleError, which names the modules.
    assert {*TopologicalSorter(imports).static_order()} == {*modules}


def test_a_party_and_a_method_have_few_members() -> None:
    party = make_party()
    assert len(list_members(party)) <= 16
    assert len(list_members(party.rows)) <= 12
    assert len(list_members(party.exchanges)) <= 11
    hooks = [name for name in vars(Method) if callable(getattr(Method, name)) and name[0] != "_"]
    assert len(hooks) <= 12
    assert len(fields(Method)) <= 8


def test_the_facts_of_a_method_are_complete() -> None:
    settings = METHOD.settings.model_validate({"epochs": 1})
    assert get_facts(METHOD, settings).one_process == ""
    opaque = SplitNN(METHOD.settings, METHOD.active, METHOD.passive)
    assert "forward passes" in str(get_facts(opaque, settings).one_process)
    alone = FEDONCE.settings.model_validate({"epochs": 1, "active": False})
    assert list_idle(get_facts(FEDONCE, alone), RECIPE) == {"p0"}


@pytest.mark.parametrize(
    "facts",
    [
        {"noise": float("nan")},
        {"noise": -1.0},
        {"noise": "0.1"},
        {"in_flight": 0},
        {"in_flight": "4"},
        {"in_flight": 10**9},
        {"idle": "x"},
        {"late_policy": "never"},
        {"learns": "magic"},
        {"follows": frozenset({"unknown"})},
        {"follows": "loss"},
        {"protects": 7},
    ],
    ids=str,
)
def test_wrong_facts_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(facts))):
        MethodFacts(**facts)


def test_a_hook_that_is_a_fact_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Silent.noise: .* Return it from facts"):
        type("Silent", (Method,), {"noise": lambda self, settings: 1.0})
    shapeless = type("Shapeless", (SplitNN,), {"facts": lambda self, settings: None})
    with pytest.raises(TypeError, match="must return MethodFacts"):
        get_facts(
            shapeless(METHOD.settings, METHOD.active, METHOD.passive),
            METHOD.settings.model_validate({"epochs": 1}),
        )
