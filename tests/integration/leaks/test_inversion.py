"""The model inversion attack: its decoder, its measures, what it finds, and the program that
attacks a party's run.
"""

from __future__ import annotations

import io
import json
import math
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

from tests.harness.errors import assert_names, raises
from vfl.simulation.inprocess import run_in_process
from vfl_common.config.base import read_toml
from vfl_common.config.data import DataSettings
from vfl_common.config.models import CnnSettings, EncoderSettings, NetworkSettings
from vfl_common.config.recipe import Recipe, divide
from vfl_common.errors import Code, InputError
from vfl_common.process.program import run_for_status
from vfl_leaks import invert as program
from vfl_leaks.inversion import InversionSettings, LatentPairs, invert, reconstruct, train_decoder
from vfl_leaks.picture import draw_pairs
from vfl_party.methods.mocosfl.resist import get_window_size, measure_likeness, ssim
from vfl_party.models import seed_torch
from vfl_party.models.halves import Bottleneck, Decoder, Halves

EXAMPLE = Path(__file__).parents[3] / "examples" / "mocosfl" / "digits.toml"
FEW = InversionSettings(epochs=3, batch_size=16)


def digits(start: int, stop: int) -> Tensor:
    return torch.tensor(load_digits().images[start:stop, None] / 16.0, dtype=torch.float32)


# -- the decoder

CNN = CnnSettings(kind="cnn", channels=(8, 12, 16, 20))
NETWORKS: list[EncoderSettings] = [
    CNN,
    NetworkSettings(kind="resnet18"),
    NetworkSettings(kind="resnet18", small_images=False),
]


@pytest.mark.parametrize("network", NETWORKS, ids=["cnn", "resnet18", "resnet18 for large images"])
@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.parametrize("image", [(1, 8, 8), (3, 32, 32)])
def test_latents_of_every_cut_become_images(
    network: EncoderSettings, cut: int, image: tuple[int, int, int]
) -> None:
    halves = Halves(network, image, cut)
    with seed_torch(1), torch.no_grad():
        x = torch.rand(2, *image)
        z = halves.bottom()(x)
        decoder = Decoder(halves.latent, image)
        found = decoder(z)
    assert found.shape == x.shape
    assert 0.0 <= found.min() <= found.max() <= 1.0
    doublings = sum(isinstance(each, torch.nn.ConvTranspose2d) for each in decoder.body)
    assert doublings == math.log2(image[1] / halves.latent[1])


@pytest.mark.parametrize(
    ("latent", "image"),
    [((4, 2, 2), (1, 7, 5)), ((6,), (3, 8, 4)), ((2, 9, 9), (1, 8, 8)), ((5, 3, 3), (1, 3, 3))],
)
def test_sizes_that_are_no_doublings(latent: tuple[int, ...], image: tuple[int, int, int]) -> None:
    with seed_torch(1):
        assert Decoder(latent, image)(torch.rand(2, *latent)).shape == (2, *image)


def test_the_bottleneck_is_undone_too() -> None:
    halves = Halves(CNN, (1, 8, 8), 1, Bottleneck(4, 2))
    with seed_torch(1):
        assert Decoder(halves.latent, (1, 8, 8))(halves.bottom()(torch.rand(2, 1, 8, 8))).shape == (
            2,
            1,
            8,
            8,
        )


# -- the measures


def by_hand(a: Tensor, b: Tensor, size: int) -> float:
    """SSIM of Wang et al. (2004), window by window, at every pixel of a mirrored image."""
    reach = size // 2
    offsets = np.arange(-reach, reach + 1)
    line = np.exp(-0.5 * (offsets / (0.3 * reach)) ** 2)
    weights = np.outer(line, line) / np.outer(line, line).sum()
    found = []
    for x, y in zip(a.flatten(0, 1).numpy(), b.flatten(0, 1).numpy(), strict=True):
        x, y = (np.pad(each, reach, mode="reflect") for each in (x, y))
        for top in range(x.shape[0] - 2 * reach):
            for left in range(x.shape[1] - 2 * reach):
                u, v = (each[top : top + size, left : left + size] for each in (x, y))
                mu, mv = (weights * u).sum(), (weights * v).sum()
                uu, vv = (weights * (u - mu) ** 2).sum(), (weights * (v - mv) ** 2).sum()
                uv = (weights * (u - mu) * (v - mv)).sum()
                c1, c2 = 0.01**2, 0.03**2
                found.append(
                    (2 * mu * mv + c1) * (2 * uv + c2) / ((mu**2 + mv**2 + c1) * (uu + vv + c2))
                )
    return float(np.mean(found))


@pytest.mark.parametrize(("side", "size"), [(2, 3), (5, 3), (8, 5), (16, 9), (21, 11)])
def test_measures_against_their_formulas(side: int, size: int) -> None:
    random = torch.Generator().manual_seed(side)
    truth = torch.rand(2, 3, side, side, generator=random, dtype=torch.float64)
    noise = torch.randn(truth.shape, generator=random, dtype=torch.float64)
    images = (truth + 0.1 * noise).clamp(0, 1)
    assert get_window_size(side, side) == size
    found = measure_likeness(images, truth)
    mse = ((images - truth) ** 2).mean().item()
    assert found.mse == pytest.approx(mse)
    assert found.psnr == pytest.approx(-10 * math.log10(mse))
    assert found.ssim == pytest.approx(by_hand(images, truth, size), abs=1e-9)
    assert ssim(images, truth).item() == found.ssim


def test_equal_images() -> None:
    found = measure_likeness(digits(0, 4), digits(0, 4))
    assert (found.mse, found.psnr) == (0.0, math.inf)
    assert found.ssim == pytest.approx(1.0)


# -- the attack


def attacked(bottom: Callable[[Tensor], Tensor], **more: Any) -> Any:
    theirs, private = digits(0, 256), digits(1000, 1064)
    return invert(
        LatentPairs(bottom(theirs), theirs), LatentPairs(bottom(private), private), FEW, **more
    )


def test_a_bottom_that_hides_nothing_is_inverted() -> None:
    said: list[tuple[int, int, float]] = []
    found = attacked(
        lambda x: torch.cat([x, 1 - x], dim=1), progress=lambda *each: said.append(each)
    )
    assert found.found.mse < 0.1 * found.baseline.mse
    assert found.found.ssim > 0.8
    assert found.found.psnr > found.baseline.psnr + 10
    assert found.images.shape == found.truth.shape == (64, 1, 8, 8)
    assert found.found == measure_likeness(found.images, found.truth)
    mean = digits(0, 256).mean(dim=0)
    assert found.baseline.mse == pytest.approx(
        functional.mse_loss(mean.expand(64, 1, 8, 8), digits(1000, 1064)).item()
    )
    assert [(done, epochs) for done, epochs, _ in said] == [(1, 3), (2, 3), (3, 3)]
    assert said[0][2] > said[-1][2] == found.trained_mse


def test_a_bottom_that_tells_nothing_is_not() -> None:
    found = attacked(lambda x: torch.ones(len(x), 2, 4, 4))
    assert found.found.mse > 0.95 * found.baseline.mse


def test_the_same_seed_makes_the_same_decoder() -> None:
    pairs, before = LatentPairs(digits(0, 33), digits(0, 33)), torch.get_rng_state()
    one, same, other = (train_decoder(pairs, InversionSettings(1, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert not one.training
    z = digits(40, 44)
    assert torch.equal(reconstruct(one, z), reconstruct(same, z))
    torch.testing.assert_close(reconstruct(one, z)[:1], reconstruct(one, z[:1]))
    assert not torch.equal(reconstruct(one, z), reconstruct(other, z))


def test_vectors_are_inverted_too() -> None:
    pairs = LatentPairs(digits(0, 64).flatten(1), digits(0, 64))
    assert pairs.latent == (64,)
    assert reconstruct(train_decoder(pairs, InversionSettings(1)), pairs.z).shape == (64, 1, 8, 8)


def test_what_are_no_pairs() -> None:
    with raises(ValueError):
        LatentPairs(digits(0, 3), digits(0, 4))
    with raises(ValueError):
        LatentPairs(digits(0, 3), 16 * digits(0, 3))
    with raises(InputError, Code.DATA_INVALID):
        train_decoder(LatentPairs(digits(0, 1), digits(0, 1)), FEW)
    with raises(InputError, Code.NON_FINITE):
        train_decoder(LatentPairs(math.inf * digits(1, 9), digits(1, 9)), FEW)


# -- the program

NORTH = """
source = "sklearn:digits"
limit = 240
scale = "minmax"
view = { scheme = "rows", part = 0, parts = 2 }
"""
SOME = {"source": "sklearn:digits", "limit": 300}
PARTY_FILE = f"""
name = "north"
recipe = "recipe.toml"
[data]
{NORTH}
"""


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, ``run``, of two parties, data of one of them, and images that
    cannot be used.
    """
    folder = tmp_path_factory.mktemp("inversion")
    tables = read_toml(EXAMPLE)
    tables["parties"] = tables["parties"][:3]
    tables["phases"][0] |= {
        "epochs": 1,
        "queue": 64,
        "width": 16,
        "bottleneck": {"channels": 4, "stride": 1},
    }
    tables["simulate"]["data"]["limit"] = 240
    recipe = Recipe.model_validate(tables)
    run_in_process(recipe, divide(recipe, folder), folder / "run")
    (folder / "north.toml").write_text(NORTH)
    (folder / "some.toml").write_text('source = "sklearn:digits"\nlimit = 480')
    (folder / "party.toml").write_text(PARTY_FILE)
    (folder / "other.toml").write_text(NORTH.replace("part = 0", "part = 1"))
    (folder / "wrong.toml").write_text('sorce = "sklearn:digits"')
    (folder / "labels.toml").write_text('source = "sklearn:digits"\nlimit = 240\nlabel = "target"')
    np.savez(folder / "large.npz", images=np.zeros((5, 16, 16), np.uint8))
    np.savez(folder / "own.npz", images=digits(0, 1).numpy())
    np.savez(folder / "bright.npz", images=2 * digits(300, 310).numpy())
    return folder


def tried(folder: Path, tmp_path: Path, **changed: str) -> int:
    """Runs the program, with a result in ``tmp_path``. Returns its exit code."""
    options = {
        "run": "run",
        "party": "north",
        "data": "north.toml",
        "auxiliary": "sklearn:digits",
        "epochs": "1",
    }
    options |= {"out": str(tmp_path / "found.json")} | changed
    for name in ("run", "data"):
        options[name] = str(folder / options[name])
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return run_for_status(
        lambda: program.cli.main(words, prog_name="invert", standalone_mode=False)
    )


def test_a_partys_bottom_is_attacked(
    once: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tried(once, tmp_path, auxiliary=str(once / "some.toml"), epochs="4") == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["auxiliary"] == {"source": "sklearn:digits", "images": 480 - 120, "left_out": 120}
    assert (found["cut"], found["bottleneck"], found["latent"]) == (1, "C4S1", [4, 4, 4])
    assert found["private"] == {"images": 84, "training_rows": 84}
    assert found["settings"] == {"epochs": 4, "batch_size": 32, "lr": 0.001, "seed": 1}
    assert (found["run_id"], found["party"], found["ssim_window"]) == ("run", "north", 5)
    assert found["reconstruction"]["mse"] < found["mean_image"]["mse"]
    shown = capsys.readouterr()
    assert (
        "cut = 1 and bottleneck C4S1, latents of 4 x 4 x 4; 360 auxiliary images of sklearn:digits"
        in shown.out
    )
    assert f"{found['reconstruction']['mse']:.5f}" in shown.out
    assert "120 auxiliary images were left out because they are the party's." in shown.out
    assert re.fullmatch(r"(training the decoder: epoch \d of 4, MSE \d\.\d+\n)+", shown.err)
    picture = tmp_path / "found.png"
    with Image.open(picture) as image:
        assert image.width > 4 * image.height > 0
        assert np.ptp(np.asarray(image.convert("L"))) > 200
    assert stat.S_IMODE(picture.stat().st_mode) == 0o600


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_pictures_in_grey_and_in_colour(channels: int) -> None:
    red = torch.zeros(3, channels, 8, 6)
    red[:, 0] = 1.0
    drawn = draw_pairs([("truth", red), ("reconstruction", red)], "title")
    with Image.open(io.BytesIO(drawn)) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 16) or []}
    assert ((255, 0, 0) in colours) == (channels == 3)


def test_images_of_a_file_and_the_data_of_a_party_file(once: Path, tmp_path: Path) -> None:
    public = tmp_path / "public.npz"
    np.savez(public, images=(255 * digits(300, 364).numpy()).astype(np.uint8))
    assert tried(once, tmp_path, data="party.toml", auxiliary=str(public)) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["auxiliary"] == {"source": str(public), "images": 64, "left_out": 0}


def test_columns_of_pixels_become_images(once: Path, tmp_path: Path) -> None:
    pixels = digits(300, 340).flatten(1)
    lines = [",".join(["id", *(f"p{number}" for number in range(64))])]
    lines += [",".join([str(row), *map(str, values)]) for row, values in enumerate(pixels.tolist())]
    (tmp_path / "public.csv").write_text("\n".join(lines))
    (tmp_path / "public.toml").write_text('source = "public.csv"\nid = "id"')
    assert tried(once, tmp_path, auxiliary=str(tmp_path / "public.toml")) == 0
    assert json.loads((tmp_path / "found.json").read_text())["auxiliary"]["images"] == 40


def test_an_attack_that_failed_says_so(
    once: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A decoder that has learnt nothing does not show that images are private."""
    np.savez(tmp_path / "few.npz", images=digits(300, 304).numpy())
    assert tried(once, tmp_path, auxiliary=str(tmp_path / "few.npz")) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failed"] is (found["reconstruction"]["mse"] > found["mean_image"]["mse"]) is True
    assert "does not show that the images are private" in " ".join(capsys.readouterr().out.split())
    assert tried(once, tmp_path, auxiliary=str(once / "some.toml"), epochs="4") == 0
    assert json.loads((tmp_path / "found.json").read_text())["failed"] is False
    assert "The attack failed" not in capsys.readouterr().out


def test_pixels_on_the_scale_of_a_party_s_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Columns from 0 to 16, which the party scales from 0 to 1: so are the images that are
    compared.
    """

    def table(path: Path, start: int, stop: int, times: float) -> str:
        pixels = times * digits(start, stop).flatten(1)
        lines = [",".join(["id", *(f"p{number}" for number in range(64))])]
        lines += [
            ",".join([str(start + row), *map(str, values)])
            for row, values in enumerate(pixels.tolist())
        ]
        path.write_text("\n".join(lines))
        return str(path)

    data = {"id": "id", "image_shape": [1, 8, 8], "scale": "minmax"}
    tables = read_toml(EXAMPLE)
    tables["parties"] = tables["parties"][:3]
    tables["phases"] = [
        tables["phases"][0] | {"epochs": 1, "queue": 64, "width": 16, "batch_size": 10}
    ]
    parties: dict[str, Any] = {
        name: data | {"source": table(tmp_path / f"{name}.csv", start, start + 60, 16.0)}
        for name, start in (("north", 0), ("south", 60))
    }
    parties["registry"] = {"source": "sklearn:digits", "label": "target", "columns": []}
    tables["simulate"] = {"parties": parties}
    made = Recipe.model_validate(tables)
    run_in_process(made, divide(made, tmp_path), tmp_path / "run")
    (tmp_path / "north.toml").write_text(
        'source = "north.csv"\nid = "id"\nimage_shape = [1, 8, 8]\nscale = "minmax"'
    )
    public = tmp_path / "public.toml"
    public.write_text('source = "public.csv"\nid = "id"')
    table(tmp_path / "public.csv", 300, 340, 16.0)
    assert tried(tmp_path, tmp_path, auxiliary=str(public)) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["mean_image"]["mse"] < 0.2
    with Image.open(tmp_path / "found.png") as image:
        assert np.ptp(np.asarray(image.convert("L"))) > 200
    table(tmp_path / "public.csv", 300, 340, 1.0)
    capsys.readouterr()
    assert tried(tmp_path, tmp_path, auxiliary=str(public)) == 2
    assert_names(capsys.readouterr().err, "public.csv")


def test_rows_and_images_are_the_same_each_time(once: Path) -> None:
    data, theirs = (
        DataSettings.model_validate(each) for each in (read_toml(once / "north.toml"), SOME)
    )
    settings = InversionSettings(epochs=1)
    one, same = (
        program.attack(
            once / "run",
            "north",
            data,
            theirs,
            settings,
            device=torch.device("cpu"),
            progress=lambda *_: None,
        )
        for _ in range(2)
    )
    assert one.as_json() == same.as_json()
    assert torch.equal(one.inverted.images, same.inverted.images)


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "no such run": (
        {"run": "other"},
        r"other: has no run of north. Give the folder <out>/<run id>",
    ),
    "no such party": ({"party": "west"}, r"run: has no run of west. Give the folder"),
    "a party without images": (
        {"party": "registry", "data": "labels.toml"},
        r"registry: its rows are not images",
    ),
    "another party's file": (
        {"party": "south", "data": "party.toml"},
        r"is not the party file of south \(got north\)",
    ),
    "other rows": (
        {"data": "other.toml"},
        r"its rows are not the rows that north used in run\. Give the data",
    ),
    "no such data": ({"data": "none.toml"}, r"none\.toml: no such file"),
    "a wrong key": (
        {"data": "wrong.toml"},
        r"wrong\.toml: unknown key 'sorce'; did you mean 'source'\?",
    ),
    "larger images": ({"auxiliary": "large.npz"}, r"images of 1 x 8 x 8 .* \(got 1 x 16 x 16\)"),
    "no images": (
        {"auxiliary": "sklearn:iris"},
        r"sklearn:iris: must have images of 1 x 8 .* \(got no images\)",
    ),
    "its own images": (
        {"auxiliary": "own.npz"},
        r"own\.npz: must have at least 2 images that are not the party's \(got 0 of 1\)",
    ),
    "pixels beyond 1": (
        {"auxiliary": "bright.npz"},
        r"bright\.npz: some pixels are missing, or not from 0 to 1",
    ),
    "a wrong result": ({"out": "found.csv"}, r"--out: must end in \.json \(got .*found\.csv\)"),
    "no folder": (
        {"out": "none/found.json"},
        r"found\.json: its folder does not exist\. Create it",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_cannot_be_attacked_is_one_sentence(
    case: str,
    once: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed, sentence = REFUSED[case]
    monkeypatch.chdir(once)
    before = sorted(once.rglob("*"))
    code = tried(once, tmp_path, **changed)
    error = capsys.readouterr().err
    assert code == 2, error
    assert error.count("\n") == 1
    assert error.startswith("error: ")
    assert re.search(sentence, error), error
    assert sorted(once.rglob("*")) == before
    assert list(tmp_path.iterdir()) == []
