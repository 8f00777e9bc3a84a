"""The blocks of the page about trackers run, with stand-ins for the packages, which tests do not
install.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vfl

REPO = Path(__file__).parents[3]
PAGE = REPO / "docs" / "how-to" / "python" / "results.md"
WANDB, AIM = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


class Kept:
    """What a run of a tracker was given, by the calls that the page makes."""

    def __init__(self, **named: Any) -> None:
        self.named, self.logged, self.summary = named, list[dict[str, Any]](), dict[str, Any]()
        self.tracked, self.set, self.closed = list[tuple[Any, ...]](), dict[str, Any](), False

    # wandb
    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    # aim
    def __setitem__(self, key: str, value: Any) -> None:
        self.set[key] = value

    def track(self, value: float, *, name: str, step: int, context: dict[str, str]) -> None:
        self.tracked.append((value, name, step, context))

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (REPO / "examples" / "breast-cancer.toml").read_text()
    Path("recipe.toml").write_text(re.sub(r"^epochs = \d+", "epochs = 2", text, flags=re.MULTILINE))


def run(code: str, module: str, stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setitem(sys.modules, module, stand_in)
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - our own document
    return names


def test_every_round_is_logged_to_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    names = run(WANDB, "wandb", SimpleNamespace(init=Kept), monkeypatch)
    tracked, made = names["tracked"], names["run"]
    assert tracked.closed
    assert tracked.named["config"] == vfl.Recipe.load("recipe.toml").to_dict()
    losses = [each["splitnn/train/loss"] for each in tracked.logged if "splitnn/train/loss" in each]
    curve = [value for value in made.curves()["train loss"] if value is not None]
    assert losses == curve
    assert len(losses) == 2
    assert tracked.summary == {"bytes": made.bytes.total.payload_bytes}


def test_every_round_is_tracked_by_aim(monkeypatch: pytest.MonkeyPatch) -> None:
    names = run(AIM, "aim", SimpleNamespace(Run=Kept), monkeypatch)
    tracked, made = names["tracked"], names["run"]
    assert tracked.closed
    context = {"phase": "splitnn", "split": "train"}
    found = [each for each in tracked.tracked if each[3] == context]
    curve = [value for value in made.curves()["train loss"] if value is not None]
    assert [(value, name, step) for value, name, step, _ in found] == [
        (value, "loss", step) for step, value in enumerate(curve, 1)
    ]
    assert tracked.set["recipe"] == vfl.Recipe.load("recipe.toml").to_dict()
