"""A class that is used beyond its room has a name of its own, so that a name in a message, a
document or a search leads to one place. Within a room, a folder, a plain name may be used again.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).parents[3]
PACKAGES = (
    "vfl",
    "vfl_common",
    "vfl_governance",
    "vfl_hub",
    "vfl_lab",
    "vfl_leaks",
    "vfl_papers",
    "vfl_party",
    "vfl_serve",
    "vfl_server",
)
# The library's is the other with its data.
TWICE = {"Recipe": {"vfl.library.recipe", "vfl_common.config.recipe"}}


class Names(NamedTuple):
    """The names of a module: its own classes, {what it imports: (module, name)}, and the pairs
    (x, y) of each ``x.y`` in it.
    """

    classes: list[str]
    imports: dict[str, tuple[str, str]]
    attributes: set[tuple[str, str]]


def names_of(tree: ast.Module) -> Names:
    found = Names([], {}, set())
    for each in tree.body:
        if isinstance(each, ast.ClassDef) and not each.name.startswith("_"):
            found.classes.append(each.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found.imports[alias.asname or alias.name] = (node.module, alias.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.attributes.add((node.value.id, node.attr))
    return found


def ours() -> dict[str, Names]:
    """Returns {a module of ours: its names}."""
    return {
        ".".join(file.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__"): names_of(
            ast.parse(file.read_text())
        )
        for package in PACKAGES
        for file in (REPO / package).rglob("*.py")
    }


def used_beyond_their_rooms(modules: dict[str, Names]) -> dict[str, set[str]]:
    """Returns {a class: the modules that define one of this name for other rooms too}."""

    def definition(module: str, name: str) -> tuple[str, str]:
        # A package hands names of its modules on.
        while module in modules and name in modules[module].imports:
            module, name = modules[module].imports[name]
        return module, name

    found: defaultdict[str, set[str]] = defaultdict(set)
    for user, (_, imports, attributes) in modules.items():
        taken = set(imports.values())
        taken |= {(".".join(imports[x]), y) for x, y in attributes if x in imports}
        for module, name in (definition(*each) for each in taken):
            room = module.rpartition(".")[0]
            is_class = module in modules and name in modules[module].classes
            if is_class and not f"{user}.".startswith(f"{room}."):
                found[name].add(module)
    return found


def test_no_class_that_other_rooms_use_has_the_name_of_another() -> None:
    modules = ours()
    # It has looked at our classes.
    assert sum(len(names.classes) for names in modules.values()) > 400
    found = used_beyond_their_rooms(modules)
    assert len(found) > 200
    assert {name: places for name, places in found.items() if len(places) > 1} == TWICE


def test_the_same_name_is_seen_where_two_rooms_give_it_to_others() -> None:
    def module(*classes: str, **imports: tuple[str, str]) -> Names:
        return Names(list(classes), imports, set())

    modules = {
        "vfl_party.a.x": module("Job"),
        "vfl_party.a.y": module(Job=("vfl_party.a.x", "Job")),
        "vfl_party.b.x": module("Job"),
        "vfl_party.b": module(Job=("vfl_party.b.x", "Job")),
        "vfl.c.x": module(Mine=("vfl_party.b", "Job")),
    }
    assert used_beyond_their_rooms(modules) == {"Job": {"vfl_party.b.x"}}
    modules["vfl.c.y"] = module(Other=("vfl_party.a.x", "Job"))
    assert used_beyond_their_rooms(modules) == {"Job": {"vfl_party.a.x", "vfl_party.b.x"}}
