"""Initial weights that no peer can compute: others in each run, the same after a death, and nothing
else changes.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import cases, kills
from tests.harness.errors import assert_names, raises
from tests.harness.memory import in_process, parameters
from tests.integration.test_exact import largest_deviation
from vfl_common.config.party import PartyFile
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.run_folder import RunFolder
from vfl_leaks.recording import find_facts, observe
from vfl_party.assembly.models import encoder_settings
from vfl_party.assembly.party import Assembled
from vfl_party.base.checkpoint import CheckpointStore
from vfl_party.base.seeds import secret_seed
from vfl_party.models import InputSpec
from vfl_party.outbound.filter import Passage, Tensors
from vfl_party.phases.context import MakeEncoder
from vfl_party.runtime import generation

MLP = {"kind": "mlp", "hidden": [12], "dropout": 0.3}
BINARY: dict[str, Any] = {"kind": "binary"}
TABLE = cases.columns("sklearn:breast_cancer", 3, limit=120)
SPLIT = {"kind": "splitnn", "epochs": 3, "batch_size": 24}
FEDHSSL = {
    "kind": "fedhssl",
    "rounds": 3,
    "batch_size": 24,
    "ssl": "moco",
    "queue": 32,
    "predictor": 8,
}
FEDCVT = {
    "kind": "fedcvt",
    "epochs": 4,
    "batch_size": 16,
    "unlabelled_batch_size": 16,
    "own_batch_size": 8,
}


def made(parties: int, *phases: dict[str, Any], **more: Any) -> dict[str, Any]:
    run = {"heartbeat_s": 0.2, "lost_after_s": 5.0, "rejoin_deadline_s": kills.WAIT_S}
    return cases.recipe(parties, run=run, task=BINARY, **more) | {"phases": [*phases]}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "split training with dropout": (
        made(3, SPLIT, model={"encoder": MLP, "top": {"hidden": [8], "dropout": 0.4}}),
        TABLE,
    ),
    "FedHSSL": (
        made(
            2,
            FEDHSSL | {"projector": [16, 16, 12], "aggregate": True},
            SPLIT,
            rows={"aligned": 0.5},
        ),
        cases.columns("sklearn:breast_cancer", 2, limit=160),
    ),
    "FedOnce": (
        made(
            3,
            {"kind": "fedonce", "epochs": 4, "batch_size": 24},
            {"kind": "head", "epochs": 3, "batch_size": 24},
            model={"embedding_size": 3, "encoder": MLP},
        ),
        TABLE,
    ),
    "FedCVT": (
        made(2, FEDCVT, rows={"aligned": 0.6, "labelled": 48}),
        cases.columns("sklearn:breast_cancer", 2, limit=160),
    ),
}
FIRST = "split training with dropout"


# -- what a peer could compute
# ----------------------------------------------------------------------


class FirstSent:
    """Keeps the columns of the first batch that a party sends, and the embeddings."""

    def __init__(self, assembled: Assembled, found: dict[str, Tensor]) -> None:
        self._party, self._found = assembled.party, found
        self._of = find_facts(assembled.party, assembled.phases[0])

    def note_sent(self, at: Passage, meant: Tensors, sent: Tensors) -> None:
        if "z" not in self._found:
            rows = self._of.rows_at("embedding", at.step)
            assert rows is not None
            self._found["x"] = self._party.rows.need_features().inputs(rows)[0]
            self._found["z"] = sent["z"].clone()

    def note_received(self, at: Passage, tensors: Tensors, payload_bytes: int) -> None:
        """Keeps nothing of what comes back."""


def first_message(folder: Path, secrets: dict[str, bytes] | None) -> tuple[Tensor, Tensor]:
    """Runs a federation; returns the columns of p1's first batch, and the embeddings that it sent
    of them.
    """
    tables, data = made(3, SPLIT | {"epochs": 1}), TABLE
    found: dict[str, Tensor] = {}

    def attach(name: str, party: Assembled) -> None:
        if name != "p1":
            return
        (opened,) = [
            each
            for (_, exchange), each in party.party.exchanges.opened.items()
            if exchange == "embedding"
        ]
        observe(opened, lambda _chains: FirstSent(party, found))

    in_process(folder, tables, data, attach=attach, secrets=secrets)
    return found["x"], found["z"]


def rebuilt(x: Tensor) -> Tensor:
    """What a peer makes of p1's columns, if it knows the recipe alone."""
    recipe = Recipe.model_validate(made(3, SPLIT | {"epochs": 1}))
    make = MakeEncoder(recipe, "p1", encoder_settings(recipe, "p1", None), InputSpec((x.shape[1],)))
    found: Tensor = make("encoder").train()(x)
    return found


def test_the_first_message_follows_from_the_recipe_or_from_a_secret(tmp_path: Path) -> None:
    x, z = first_message(tmp_path / "recipe", None)
    assert torch.equal(rebuilt(x), z)
    some = [
        first_message(tmp_path / run, {name: generation.new_secret() for name in TABLE})
        for run in ("one", "other")
    ]
    assert all(torch.equal(x, each) for each, _ in some)
    sent = [z, *(each for _, each in some)]
    for number, one in enumerate(sent):
        for other in sent[:number]:
            assert (one - other).abs().max().item() > 0.05
    for name in ("p0", "p1", "p2"):
        runs = [parameters(tmp_path / run / name) for run in ("recipe", "one", "other")]
        weights = {key for key in runs[0] if key.endswith("weight")}
        assert {key.partition(".")[0] for key in weights} == {
            "encoder",
            *(["top"] if name == "p0" else []),
        }
        for key in weights:
            assert len({each[key].sum().item() for each in runs}) == 3, key


def test_a_party_file_asks_for_secret_weights_unless_it_says_otherwise() -> None:
    assert PartyFile.model_fields["init"].default == "secret"


# -- a run that is disturbed
# ----------------------------------------------------------------------


@dataclass
class Secretly(kills.Killed):
    """A federation of programs whose party files say nothing of ``init``, or what ``init`` says
    here.
    """

    init: str = ""

    def write_party(self, name: str) -> Path:
        path = super().write_party(name)
        path.write_text(
            path.read_text().replace(
                'init = "recipe"\n', f'init = "{self.init}"\n' if self.init else ""
            )
        )
        return path


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return kills.plugged(tmp_path_factory.mktemp("site"))


def undisturbed(folder: Path, case: str, of: Path) -> None:
    """Runs in this process with the secrets of a run over processes."""
    tables, data = CASES[case]
    in_process(
        folder,
        tables,
        data,
        secrets={name: (of / name / generation.INIT_SECRET).read_bytes() for name in data},
    )


@pytest.mark.parametrize(
    ("case", "victim", "moment"),
    [
        (FIRST, "p1", "start-received"),
        (FIRST, "p1", "before-first-step"),
        (FIRST, "p0", "after-mid-epoch"),
        ("FedHSSL", "p1", "round-done"),
        ("FedHSSL", "p0", "plan-sent"),
        ("FedOnce", "p1", "checkpoint-named"),
        ("FedOnce", "p1", "checkpoint-half"),
        ("FedCVT", "p1", "checkpoint-named"),
    ],
)
def test_a_killed_party_goes_on_with_its_secret_bit_for_bit(
    case: str, victim: str, moment: str, tmp_path: Path, plugin: dict[str, str]
) -> None:
    tables, data = CASES[case]
    with Secretly(tmp_path / "killed", tables, data) as federation:
        federation.plugin = plugin
        kills.survive(federation, (victim,), moment)
    run = federation.run_folder
    secrets = {name: run / name / generation.INIT_SECRET for name in federation.names}
    assert len({path.read_bytes() for path in secrets.values()}) == len(secrets)
    undisturbed(tmp_path / "whole", case, run)
    for name, path in secrets.items():
        assert path.stat().st_mode & 0o777 == 0o600
        assert json.loads((run / name / "run.json").read_text())["init"] == "secret"
        whole = parameters(tmp_path / "whole" / name)
        assert largest_deviation({name: federation.parameters(name)}, {name: whole}) == 0.0
    in_process(tmp_path / "recipe", tables, data)
    key = next(each for each in whole if each.endswith("weight"))
    assert not torch.equal(parameters(tmp_path / "recipe" / name)[key], whole[key])


def test_a_run_goes_on_as_it_began_and_says_so(tmp_path: Path, plugin: dict[str, str]) -> None:
    with Secretly(tmp_path / "killed", *CASES[FIRST]) as federation:
        federation.plugin = plugin
        kills.killed(federation, "p1", "after-mid-epoch")
        federation.init = "recipe"
        federation.start_one("p1")
        federation.finish()
    undisturbed(tmp_path / "whole", FIRST, federation.run_folder)
    for name in federation.names:
        whole = parameters(tmp_path / "whole" / name)
        assert largest_deviation({name: federation.parameters(name)}, {name: whole}) == 0.0
    log = [
        json.loads(line)
        for line in (federation.run_folder / "p1" / "log.jsonl").read_text().splitlines()
    ]
    said = [line for line in log if line.get("event") == "init"]
    assert said[0]["init"] == "secret"
    assert "init = 'secret'" in said[-1]["message"]
    assert_names(said[-1]["message"], "secret", "p1")


# -- what the folder keeps
# ----------------------------------------------------------------------


def folder(path: Path, *, checkpoints: int) -> RunFolder:
    path.mkdir()
    found = RunFolder(path, "run-1")
    found.note(job="train")
    found.checkpoints = CheckpointStore(path / "checkpoints", 2)
    for number in range(checkpoints):
        found.checkpoints.save(f"{number:06d}.splitnn.{number}", {})
    return found


def test_a_run_has_one_secret_and_each_run_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one, other = (folder(tmp_path / name, checkpoints=0) for name in ("one", "other"))
    first = generation.load_own_secret(one, "secret", b"1" * 32)
    assert first == generation.load_own_secret(one, "secret", b"2" * 32) == secret_seed(b"1" * 32)
    assert first == generation.load_own_secret(one, "recipe", b"2" * 32)
    assert generation.load_own_secret(other, "secret", b"2" * 32) not in (None, first)
    assert not any(
        str(first) in record.getMessage() or "1" * 32 in record.getMessage()
        for record in caplog.records
    )
    assert (
        generation.load_own_secret(folder(tmp_path / "plain", checkpoints=0), "recipe", b"1" * 32)
        is None
    )
    assert not (tmp_path / "plain" / generation.INIT_SECRET).exists()


def test_a_run_of_an_earlier_release_goes_on_with_the_recipe_s_seed(tmp_path: Path) -> None:
    assert (
        generation.load_own_secret(folder(tmp_path / "begun", checkpoints=1), "secret", b"1" * 32)
        is None
    )
    assert (
        generation.load_own_secret(folder(tmp_path / "not", checkpoints=0), "secret", b"1" * 32)
        is not None
    )


def test_a_lost_secret_is_not_replaced(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", checkpoints=0)
    generation.load_own_secret(run, "secret", b"1" * 32)
    assert run.checkpoints is not None
    run.checkpoints.save("000001.splitnn.1", {})
    (run.path / generation.INIT_SECRET).unlink()
    with raises(InputError, Code.FILE_INVALID, names="--fresh"):
        generation.load_own_secret(run, "secret", b"2" * 32)
    (run.path / generation.INIT_SECRET).write_bytes(b"short")
    with raises(InputError, Code.FILE_INVALID, names="32"):
        generation.load_own_secret(run, "secret", b"2" * 32)
