"""Rehearsals in other processes find what one in this process does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import vfl
from tests.harness.errors import raises
from tests.integration.leaks.test_leaks import tables
from vfl_common.errors import Code
from vfl_leaks.orders import read, to_plain
from vfl_leaks.rehearsal import Played
from vfl_leaks.scene import Figure, Shown


def figures(found: vfl.Leaks) -> list[dict[str, Any]]:
    """All values of all seeds but for the clock, which is no part of a seed."""
    recipes: list[dict[str, Any]] = found.as_json()["recipes"]
    for each in recipes:
        assert each.pop("times")
    return recipes


def test_two_jobs_find_the_same_as_one(tmp_path: Path) -> None:
    half = tables(codec="float16") | {"name": "half"}
    given = [tables(), half]
    call: dict[str, Any] = {"attacks": ["norm", "columns"], "seeds": [1, 2], "quiet": True}
    here = vfl.leaks(given, **call)
    there = vfl.leaks(given, **call, jobs=2, out=tmp_path)
    assert figures(there) == figures(here)
    assert len([*tmp_path.iterdir()]) == 4
    # What came back as a file is read.
    assert not list(tmp_path.glob("*/rehearsal.json"))


def test_what_was_found_before_a_run_that_failed_is_told(tmp_path: Path) -> None:
    told: list[Any] = []
    given = [tables(), tables(optimizer={"lr": -1.0}) | {"name": "odd"}]
    with raises(vfl.VflError, Code.CONFIG_INVALID, names="optimizer.lr"):
        vfl.leaks(given, attacks=["norm"], quiet=True, jobs=2, out=tmp_path, tell=told.append)
    (one,) = told
    assert one.lines


def test_images_come_back_whole() -> None:
    images = torch.rand(2, 1, 3, 3)
    shown = Shown("p1", (("private", images), ("read", images / 3)), "SSIM 0.5")
    figure = Figure("p1: images", "", "SSIM", 1 / 3, baselines={"mean": 0.1}, shown=shown)
    played = [Played("images", "reads images", "p0", (figure,)), Played("norm", "", "p0")]
    (back, _, _, gaps) = read(json.loads(json.dumps(to_plain((played, (), (), ("a gap",))))))
    assert gaps == ("a gap",)
    assert (back[1], back[0].figures[0].value) == (played[1], figure.value)
    got = back[0].figures[0].shown
    assert got is not None
    assert (got.party, got.says) == ("p1", "SSIM 0.5")
    for (name, ours), (other, theirs) in zip(shown.rows, got.rows, strict=True):
        assert name == other
        assert torch.equal(ours, theirs)
