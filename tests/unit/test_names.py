"""A class has a name of its own, so that a name in a message, a document or a search leads to one
place.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

REPO = Path(__file__).parents[2]
PACKAGES = ("vfl", "vfl_common", "vfl_party", "vfl_server")
# The library's is the other with its data.
TWICE = {"Recipe": {"vfl/library/recipe.py", "vfl_common/config/recipe.py"}}


def test_no_public_class_has_the_name_of_another() -> None:
    places: defaultdict[str, set[str]] = defaultdict(set)
    for file in (file for package in PACKAGES for file in (REPO / package).rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(file.relative_to(REPO).as_posix())
    # It has looked at our classes.
    assert len(places) > 400
    assert {name: files for name, files in places.items() if len(files) > 1} == TWICE
