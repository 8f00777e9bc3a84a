"""Party files of a whole federation, tried on one machine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import vfl
from tests.harness.errors import raises
from tests.harness.present import present
from tests.unit.vfl.test_new import BANK, SHOP, run, table
from vfl.cli import cli
from vfl.simulation.federation import combine_party_files
from vfl.simulation.run import simulate
from vfl_common.config.recipe import Recipe, divide, get_simulate_settings
from vfl_common.errors import Code, InputError


@pytest.fixture(autouse=True)
def _federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a bank and a shop in the working folder; nobody has keys."""
    monkeypatch.chdir(tmp_path)
    table("bank.csv", "customer,age,default", lambda n: f"K{n},{n % 50},{('yes', 'no')[n % 2]}")
    table("shop.csv", "client_no,orders", lambda n: f"k{n},{n % 9}")
    # Noise would differ from run to run.
    run(*BANK, "--protect", "none")
    Path("shop").mkdir()
    Path("shop.csv").rename("shop/shop.csv")
    run(*[each if each != "shop.csv" else "shop/shop.csv" for each in SHOP], "--out", "shop")


def change(path: str, old: str, new: str) -> None:
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new))


def test_what_the_files_say_is_used(tmp_path: Path) -> None:
    with Path("shop/shop.toml").open("a") as file:
        file.write('threads = 3\nencoder = { kind = "mlp", hidden = [7] }\n')
    tables, base = combine_party_files([Path("bank.toml"), Path("shop/shop.toml")])
    assert base == tmp_path
    recipe = Recipe.model_validate(tables)
    data = divide(recipe, base)
    assert {name: (Path(each.source), each.id, each.label) for name, each in data.items()} == {
        "bank": (tmp_path / "bank.csv", ("customer",), "default"),
        "shop": (tmp_path / "shop" / "shop.csv", ("client_no",), None),
    }
    assert get_simulate_settings(recipe).threads == 3
    shop, bank = present(recipe.party("shop")), present(recipe.party("bank"))
    assert shop.encoder is not None
    assert shop.encoder.kind == "mlp"
    assert bank.encoder is None


def test_every_party_has_one_file_and_all_the_same_recipe() -> None:
    bank, shop = Path("bank.toml"), Path("shop/shop.toml")
    with raises(InputError, Code.CONFIG_INVALID, names=("bank.toml", "shop")):
        combine_party_files([bank])
    Path("again.toml").write_text(bank.read_text())
    with raises(InputError, Code.NOT_IN_RECIPE, names=("again.toml", "bank")):
        combine_party_files([bank, shop, Path("again.toml")])
    with raises(InputError, Code.CONFIG_INVALID, names="recipe.toml"):
        combine_party_files([bank, Path("recipe.toml")])
    with raises(InputError, Code.CONFIG_INVALID, names=("--baseline", "bank.toml")):
        simulate(bank, Path("runs"))
    Path("other.toml").write_text(
        Path("recipe.toml").read_text().replace("epochs = ", "epochs = 1")
    )
    change("shop/shop.toml", "../recipe.toml", "../other.toml")
    with raises(InputError, Code.CONFIG_INVALID, names=("shop.toml", "bank.toml")):
        combine_party_files([bank, shop])
    change("shop/shop.toml", "../other.toml", "../recipe.toml")
    change("shop/shop.toml", 'name = "shop"', 'name = "hop"')
    with raises(InputError, Code.NOT_IN_RECIPE, names=("shop.toml", "recipe.toml")):
        combine_party_files([bank, shop])
    assert not Path("runs").exists()


FILES = ["bank.toml", "shop/shop.toml"]


def shortened() -> None:
    """Training of two rounds."""
    text = Path("recipe.toml").read_text()
    text = re.sub(r"^epochs = \d+", "epochs = 2", text, flags=re.MULTILINE)
    Path("recipe.toml").write_text(re.sub(r"^early_stopping = .*\n", "", text, flags=re.MULTILINE))


def test_the_library_takes_the_files_wherever_it_takes_a_recipe() -> None:
    shortened()
    ran = vfl.simulate(FILES, quiet=True)
    recipe = vfl.Recipe.of(FILES)
    assert vfl.simulate(recipe, quiet=True).metrics == ran.metrics
    assert vfl.forecast(FILES).by_phase["splitnn"] == ran.bytes.by_phase["splitnn"]
    assert vfl.forecast("bank.toml").total == vfl.forecast(FILES).total
    found = vfl.leaks(FILES, attacks=["norm"], quiet=True).found
    assert [line.attack for each in found for line in each.lines] == ["norm"]
    assert len(vfl.study(FILES, {"phases.splitnn.epochs": [1, 2]}, quiet=True)) == 2
    for given in ([], [3], [FILES]):
        with raises(InputError, Code.CONFIG_INVALID):
            vfl.simulate(given, quiet=True)  # type: ignore[arg-type]


def test_the_commands_take_the_files_too(capsys: pytest.CaptureFixture[str]) -> None:
    shortened()
    of = {}
    for name, words in {
        "one": ["forecast", "bank.toml", "--json"],
        "all": ["forecast", *FILES, "--json"],
        "measured": ["forecast", *FILES, "--json", "--measure"],
        "leaks": ["leaks", *FILES, "--json", "--attacks", "norm"],
    }.items():
        cli.main(words, standalone_mode=False)
        of[name] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert of["one"]["phases"] == of["all"]["phases"]
    assert of["measured"]["phases"] != of["all"]["phases"]
    Path("study.toml").write_text(
        'name = "files"\nrecipe = ["bank.toml", "shop/shop.toml"]\nseeds = [1]\nmetric = "auc"\n'
        '[[finetune]]\nkind = "splitnn"\nepochs = 1\n[[finetune]]\nkind = "evaluate"\n'
        '[[methods]]\nname = "plain"\n[[methods]]\nname = "alone"\nalone = "bank"\n'
    )
    cli.main(["study", "study.toml", "--json"], standalone_mode=False)
    assert len(Path("runs/files/results.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize("how", [vfl.simulate, vfl.forecast])
@pytest.mark.parametrize("words", ['plugin = "encrypted"', 'encrypted = ["gradient"]'])
def test_the_policy_of_a_file_holds_in_a_trial(how: Callable[..., object], words: str) -> None:
    """The bank's gradients are in clear."""
    shortened()
    change("bank.toml", 'level = "careful"', f'level = "careful", {words}')
    with raises(InputError, Code.REFUSED):
        how(FILES)
