"""Runs of plug-ins in one process: their errors, their noise, and what attacks read of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import vfl
from tests.harness import cases
from tests.harness.errors import assert_names, raises
from tests.harness.plugins import EXAMPLE, metadata
from tests.harness.present import present
from vfl_common.errors import Code, InputError
from vfl_party.outbound.chain import Chain
from vfl_party.outbound.declared import Use

# --- methods, transforms and policies: a change of the example, in a package of its own

# Of shapes, that only the method knows, given at each step.
WORDS = {
    'f32("rows", "width")': 'f32("rows", "directions")',
    "EMBEDDING, width=exchanges.width)": "EMBEDDING)",
    'swap(step, {"z": z_BD}, rows, rows=len(rows))': (
        'swap(step, {"z": z_BD}, rows, rows=len(rows), directions=8)'
    ),
    "collect(step, rows=len(rows))": "collect(step, rows=len(rows), directions=8)",
}
PLAIN = {"kind": "mine", "name": "plain", "epochs": 2, "batch_size": 24}
Written = Callable[..., dict[str, Any]]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """(a module of the example, {its text: another one}, what it exports) -> a recipe with that
    plug-in, ``mine``.
    """

    def write(
        module: str, changes: Mapping[str, str], group: str, attribute: str, **phase: Any
    ) -> dict[str, Any]:
        text = (EXAMPLE / f"{module}.py").read_text()
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        (tmp_path / f"my_{module}.py").write_text(text)
        metadata(tmp_path, {group: {"mine": f"my_{module}:{attribute}"}}, name="my-plugin")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, f"my_{module}", raising=False)
        made = cases.recipe(3, task={"kind": "binary"})
        made["phases"] = [PLAIN | {"kind": "splitnn"} | phase]
        return made | {
            "simulate": {"parties": cases.columns("sklearn:breast_cancer", 3, limit=200)}
        }

    return write


def line_of(module: str, text: str, tmp_path: Path) -> int:
    lines = (tmp_path / f"my_{module}.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize(
    "changes", [{}, WORDS], ids=["the example", "words of its own in its shapes"]
)
def test_attacks_read_a_method_of_a_plug_in(changes: dict[str, str], written: Written) -> None:
    found = vfl.leaks(
        written("plain_split", changes, "vfl.methods", "METHOD", **PLAIN),
        attacks=["columns", "norm"],
        quiet=True,
    ).found[0]
    best = {line.of: line.value.mean for line in found.lines if line.attack == "columns"}
    assert best["p1: mean of columns"] > 0.2
    assert {line.attacker for line in found.lines if line.attack == "norm"} == {"p1", "p2"}
    sizes = {
        (each.sender, each.receiver): dict(each.sizes)
        for each in found.sizes
        if each.phase == "plain"
    }
    assert sizes["p1", "p0"] == sizes["p0", "p2"] == {24 * 8 * 4: 12, 16 * 8 * 4: 2}


def test_a_method_that_names_no_rows_is_said_to_be_unknown_to_attacks(written: Written) -> None:
    unnamed = {"return epoch[step.batch][1] if exchange == EMBEDDING.name else None": "return None"}
    given = written("plain_split", unnamed, "vfl.methods", "METHOD", **PLAIN)
    notes = vfl.leaks(given, attacks=["columns"], quiet=True).found[0].notes
    assert_names("\n".join(notes), "p0")


@pytest.mark.parametrize(
    ("changes", "fails"),
    [
        ({"z_BD.backward(dz_BD)": "z_BD.backward(dz_BD[:, :3])"}, True),
        ({"torch.optim.SGD(self.models": "torch.optim.SDG(self.models"}, True),
        ({"self.name, self.rounds, self.party": "self.nome, self.rounds, self.party"}, False),
        ({'EMBEDDING, {"z": f32("rows", "width")})': 'EMBEDDING, {"z": f32("rows", "w")})'}, False),
    ],
    ids=["a round", "making it", "a name", "a size"],
)
def test_an_error_of_a_method_is_a_sentence_with_its_line(
    changes: dict[str, str], fails: bool, written: Written, tmp_path: Path
) -> None:
    given = written("plain_split", changes, "vfl.methods", "METHOD", **PLAIN)
    line = line_of("plain_split", next(iter(changes.values())), tmp_path)
    with raises(InputError, Code.CONFIG_INVALID) as raised:
        vfl.simulate(given, quiet=True)
    assert (f"my_plain_split.py, line {line}: " in str(raised.value)) == fails
    assert raised.value.exit_code == 2
    assert "my" not in raised.value.public
    # A debugger, and the log, have the traceback.
    assert raised.value.__cause__ is not None or not fails


def test_a_method_of_the_former_form_is_refused_with_what_to_do(
    written: Written, tmp_path: Path
) -> None:
    changes = {"METHOD = Plain(": "METHOD = Method(traffic=Plain.traffic, settings="}
    changes["=PlainSettings, Active, Passive"] = "=PlainSettings, active=Active, passive=Passive"
    given = written("plain_split", changes, "vfl.methods", "METHOD", **PLAIN)
    with raises(InputError, Code.CONFIG_INVALID, names=("traffic", "my_plain_split")):
        vfl.simulate(given, quiet=True)


def test_an_error_of_a_transform_is_a_sentence_with_its_line(
    written: Written, tmp_path: Path
) -> None:
    use = [{"kind": "mine", "exchange": "embedding", "norm": 0.5}]
    changes = {"torch.renorm(x.detach(), p=2": "torch.renorm(x.detach(), p=0"}
    given = written("row_clip", changes, "vfl.transforms", "TRANSFORM", transforms=use)
    line = line_of("row_clip", "p=0", tmp_path)
    with raises(InputError, Code.CONFIG_INVALID, names=("my_row_clip", "0.5")) as raised:
        vfl.simulate(given, quiet=True)
    assert f"my_row_clip.py, line {line}: " in str(raised.value)


def test_noise_of_the_example_is_another_at_each_run(written: Written) -> None:
    """A peer that runs the same recipe with columns of its own does not draw it."""
    use = [{"kind": "mine", "exchange": "embedding", "clip": 1.0, "epsilon": 2.0}]
    given = written("clipped_laplace", {}, "vfl.transforms", "TRANSFORM", transforms=use)
    one, other = (vfl.simulate(given, quiet=True) for _ in range(2))
    ours, theirs = one.model("p0").top, other.model("p0").top
    assert not torch.equal(
        present(ours).state_dict()["0.weight"], present(theirs).state_dict()["0.weight"]
    )


@pytest.mark.parametrize("leave", [False, True])
def test_noise_that_every_peer_can_draw_again_is_refused(leave: bool, written: Written) -> None:
    use = [{"kind": "mine", "exchange": "embedding", "clip": 1.0, "epsilon": 2.0}]
    changes = {
        "self.random.laplace_like(z_BD)": "torch.distributions.Laplace(0.0, 1.0).sample(z_BD.shape)"
    }
    changes["from torch import Tensor"] = "import torch\nfrom torch import Tensor"
    given = written("clipped_laplace", changes, "vfl.transforms", "TRANSFORM", transforms=use)
    if leave:
        made = Use("mine", {"clip": 1.0, "epsilon": 2.0}, leave=frozenset({"count"})).make("here")
        with raises(InputError, Code.CONFIG_INVALID):
            Chain([made]).apply({"z": torch.ones(3, 2), "count": torch.ones(1)})
        return
    with raises(InputError, Code.CONFIG_INVALID):
        vfl.simulate(given, quiet=True)
