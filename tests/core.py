"""Chooses the tests of ``make test``. ``make test-all``, which CI calls, runs every test."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

REPO = Path(__file__).parents[1]
SATELLITES = ("governance", "lab", "leaks", "papers", "serve")
# {tests: paths that they test}. With the option --core, pytest leaves these tests out, unless one of
# the paths, or the tests themselves, changed.
OPTIONAL = {
    f"tests/{kind}/{name}": (f"vfl_{name}/",)
    for kind in ("unit", "integration")
    for name in SATELLITES
} | {
    # Pages name parts of every package: a new codec, for example, must be on a page.
    "tests/unit/repository": (
        *("vfl", "docs/", "deploy/", "scripts/", "proto/", ".github/"),
        *(
            "README.md",
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            "Makefile",
            "pyproject.toml",
            "mkdocs.yml",
        ),
    ),
    "tests/integration/test_site.py": ("docs/", "mkdocs.yml"),
    "tests/integration/test_containers.py": ("deploy/", "Dockerfile", "docker-compose"),
    "tests/integration/test_examples.py": ("examples/",),
    "tests/integration/test_release.py": ("scripts/",),
}


@cache
def list_changes() -> tuple[str, ...]:
    """Returns the paths that are not committed, or committed on this branch and not on main."""
    changes: set[str] = set()
    for command in (
        ("ls-files", "--modified", "--others", "--exclude-standard"),
        ("diff", "--name-only", "--cached"),
        ("diff", "--name-only", "main...HEAD"),
        ("diff", "--name-only", "origin/main...HEAD"),
    ):
        # A branch of this name, or git itself, may be missing. Then nothing counts as changed.
        done = subprocess.run(["git", *command], cwd=REPO, capture_output=True, text=True)  # noqa: S607
        if done.returncode == 0:
            changes.update(done.stdout.split())
    return tuple(sorted(changes))


def is_left_out(path: Path) -> bool:
    """Tells whether ``--core`` leaves out a file or folder of tests."""
    if not path.is_relative_to(REPO):
        return False
    name = path.relative_to(REPO).as_posix()
    tested = OPTIONAL.get(name)
    return tested is not None and not any(
        change.startswith((name, *tested)) for change in list_changes()
    )
