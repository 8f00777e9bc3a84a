"""Which methods give the same bits in two runs: ``python -m benchmarks.gpu.order``.

Each runs twice as it comes, twice with convolutions that may be summed in any order, and once more
to have torch name the operations that it knows to have no order.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import subprocess
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
from torch import Tensor

import vfl
from benchmarks.gpu.examples import write
from benchmarks.gpu.tell import device_option, tell, tiny_option
from tests.harness.memory import parameters
from vfl.simulation.federation import to_toml
from vfl_party.base import turns
from vfl_party.base.devices import plain_arithmetic

EXAMPLES = (
    "own-files/recipe.toml",
    "digits.toml",
    "fedcvt-digits.toml",
    "fedonce/breast-cancer.toml",
    "fedonce/breast-cancer-l1.toml",
    "mocosfl/digits.toml",
    "ssl/fedhssl-moco.toml",
    "ssl/ssvfl-c-moco.toml",
)
MORE: dict[str, dict[str, Any]] = {
    "digits.toml, resnet18": {"kind": "resnet18"},
    "digits.toml, vgg13": {"kind": "vgg13"},
    "digits.toml, mobilenet_v2": {"kind": "mobilenet_v2"},
}
# Of a phase, at most.
ROUNDS = 2
_LIMIT_S = 90.0


def shorter(name: str, device: str, folder: Path) -> Path:
    path = write(name.partition(",")[0], device, folder)
    tables = tomllib.loads(path.read_text())
    for phase in tables["phases"]:
        for key in ("epochs", "rounds"):
            if key in phase:
                phase[key] = min(phase[key], ROUNDS)
    if name in MORE:
        tables["model"]["encoder"] = MORE[name]
    path.write_text(to_toml(tables))
    return path


@contextlib.contextmanager
def any_order() -> Iterator[None]:
    """Have parties of this process leave the order to cuDNN."""

    def begin() -> Any:
        back = plain_arithmetic()
        torch.backends.cudnn.deterministic = False
        return back

    with patch.object(turns, "plain_arithmetic", begin):
        yield


def train(recipe: Path) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        run = vfl.simulate(recipe, out=folder, quiet=True)
        found = {}
        for party in run.folder.iterdir():
            if (party / "checkpoints").is_dir():
                found |= {f"{party.name}.{key}": x for key, x in parameters(party).items()}
        return found


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference."""
    assert one
    assert one.keys() == other.keys()
    return max(float((x.double() - other[key].double()).abs().max()) for key, x in one.items())


def look(name: str, device: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recipe = shorter(name, device, Path(folder))
        facts = {"one order": apart(train(recipe), train(recipe))}
        with any_order():
            facts["any order"] = apart(train(recipe), train(recipe))
        torch.use_deterministic_algorithms(True, warn_only=True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            train(recipe)
        named = {str(each.message)[:160] for each in said if "determinis" in str(each.message)}
        tell("order", example=name, apart=facts, named=sorted(named))


@click.command()
@device_option
@tiny_option
@click.option("--example", help="Only this one, in this process.")
def main(device: str, tiny: bool, example: str | None) -> None:
    """Run them, several at a time."""
    if example is not None:
        look(example, device)
        return
    wanted = EXAMPLES[:2] if tiny else (*MORE, *EXAMPLES)

    def run(name: str) -> str:
        words = [sys.executable, "-m", "benchmarks.gpu.order", "--device", device]
        done = subprocess.run(
            [*words, "--example", name],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        return done.stdout if done.returncode == 0 else done.stderr[-1500:]

    with concurrent.futures.ThreadPoolExecutor(2 if tiny else 6) as pool:
        for each in [pool.submit(run, name) for name in wanted]:
            try:
                print(each.result(), end="", flush=True)
            except subprocess.TimeoutExpired as error:
                tell("failed", why=str(error))


if __name__ == "__main__":
    main()
