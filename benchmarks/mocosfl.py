"""MocoSFL over rows of several clients: ``python -m benchmarks.mocosfl --data DIR [--images N]
[--epochs N]``.

The product runs in one process: the same steps, bytes and parameters as processes have. Beside
MocoSFL with cuts 1 and 3, for rows dealt evenly (IID) and two classes a client: (a) a random
network, (b) MoCo in one process on all rows, with the same cut (``one1``, ``one3``), (c) each
client alone. A linear probe of frozen features on the test images scores all, after the last epoch.
The settings were chosen once, for (b), on validation rows of other seeds.

TAResSFL: the owner trains both halves alone on images that no client has, against a decoder
(``resist``), and hands the bottom out, which stays as it is. MocoSFL's and TAResSFL's bottoms are
attacked by model inversion of the first client's images; the attacker has as many others of the
same data set.
"""

from __future__ import annotations

import io
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from benchmarks.studies import Tables
from vfl.library.model import Model
from vfl.simulation.inprocess import run_in_process
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.summary import Summary
from vfl_leaks.inversion import PRIVATE_IMAGES, InversionSettings, LatentPairs, invert
from vfl_leaks.picture import draw_pairs
from vfl_party.data.pixels import to_unit
from vfl_party.methods.mocosfl.settings import MocoSFLSettings
from vfl_party.methods.mocosfl.steps import build_bottom, build_halves

Pixels = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
CLASSES = 10
# The active party.
OWNER = "owner"


@dataclass(frozen=True)
class Images:
    """Some images with labels; ``part``: train, test or other."""

    ids: npt.NDArray[np.str_]
    # [N, H, W, C].
    pixels: Pixels
    labels: Numbers
    part: npt.NDArray[np.str_]

    def save(self, path: Path, rows: Numbers, *, labels: bool = False, pixels: bool = True) -> None:
        """Writes an NPZ with some of the rows."""
        arrays: dict[str, Any] = {"id": self.ids[rows]}
        if pixels:
            part = np.where(self.part[rows] == "test", "test", "train")
            arrays |= {"image": self.pixels[rows], "part": part}
        np.savez(path, **arrays, **({"label": self.labels[rows]} if labels else {}))


def cifar10(data: Path, train: int, test: int, others: int, *, validate: bool) -> Images:
    """Takes the first training and test images of CIFAR-10 (JPEG), which are in random order.

    ``others``: training images beside these, which no client has. ``validate``: takes the last
    training images instead of test images.
    """
    whole = pq.read_table(data / "cifar10.parquet")
    part = np.array(whole["part"].to_pylist())
    first = np.flatnonzero(part == "train")
    tests = first[-test:] if validate else np.flatnonzero(part == "test")[:test]
    rows = np.concatenate([first[:train], tests, first[train : train + others]])
    part = np.repeat(["train", "test", "other"], [train, test, others])
    some = whole.take(rows)
    pixels = np.stack(
        [
            np.asarray(Image.open(io.BytesIO(each)).convert("RGB"))
            for each in some["jpeg"].to_pylist()
        ]
    )
    ids = np.array([str(each) for each in some["id"].to_pylist()])
    return Images(ids, pixels, np.array(some["label"].to_pylist(), np.int64), part)


def mnist(data: Path, train: int, test: int, others: int, *, validate: bool) -> Images:
    """Takes images of MNIST-10k, 28 x 28 pixels, padded to 32 x 32; the last of them are for
    testing.
    """
    whole = np.load(data / "mnist10k.npz")
    tests = np.arange(len(whole["images"]))[-2 * test :]
    more = np.arange(train, train + others)
    rows = np.concatenate([np.arange(train), tests[:test] if validate else tests[test:], more])
    pixels = np.pad(whole["images"][rows], ((0, 0), (2, 2), (2, 2)))[..., None]
    part = np.repeat(["train", "test", "other"], [train, test, others])
    return Images(
        np.array([f"{row:05d}" for row in rows]),
        pixels,
        whole["labels"][rows].astype(np.int64),
        part,
    )


DATASETS: dict[str, Callable[..., Images]] = {"cifar10": cifar10, "mnist": mnist}


def dealt(images: Images, clients: int, scheme: str, seed: int) -> list[Numbers]:
    """Deals the rows to clients: evenly, or so that each has training images of two classes. Test
    images: evenly.
    """
    random = np.random.default_rng(seed)
    train = random.permutation(np.flatnonzero(images.part == "train"))
    test = np.array_split(random.permutation(np.flatnonzero(images.part == "test")), clients)
    if scheme == "iid":
        own = np.array_split(train, clients)
    else:
        order = random.permutation(CLASSES)
        shards = [
            part
            for c in order
            for part in np.array_split(train[images.labels[train] == c], 2 * clients // CLASSES)
        ]
        own = [
            np.concatenate([shards[client], shards[client + clients]]) for client in range(clients)
        ]
    return [np.sort(np.concatenate(pair)) for pair in zip(own, test, strict=True)]


@dataclass
class Bench:
    """One network, one set of images, and a folder for runs."""

    images: Images
    folder: Path
    clients: int
    encoder: Tables
    features: int
    moco: Tables
    seed: int
    device: str
    threads: int
    pictures: Path | None = None
    done: dict[str, Summary] = field(default_factory=dict)

    def model(self) -> Tables:
        return {"embedding_size": self.features, "encoder": self.encoder}

    def run(self, name: str, tables: Tables, data: dict[str, Tables]) -> Summary:
        """Runs a recipe in this process; a run that is there already is not repeated."""
        names = [party["name"] for party in tables["parties"]]
        simulate = {"threads": self.threads, "devices": dict.fromkeys(names, self.device)}
        whole = {
            "name": name.lower(),
            "seed": self.seed,
            "task": {"kind": "multiclass", "classes": CLASSES},
            "model": self.model(),
            "simulate": simulate,
            **tables,
        }
        settings = {
            party: DataSettings(**{"scale": "minmax", "id": "id", **each})
            for party, each in data.items()
        }
        began = time.monotonic()
        found = run_in_process(Recipe.model_validate(whole), settings, self.folder / name)
        accuracy = found.metrics.get("test", {}).get("accuracy", float("nan"))
        print(f"{name}: {accuracy:.4f} after {time.monotonic() - began:.0f} s", flush=True)
        self.done[name] = found
        return found

    def source(self, name: str, rows: Numbers, **more: Any) -> str:
        path = self.folder / f"{name}.npz"
        self.images.save(path, rows, **more)
        return str(path)

    def rows(self, *parts: str) -> Numbers:
        return np.flatnonzero(np.isin(self.images.part, parts))

    @property
    def everything(self) -> Numbers:
        return self.rows("train", "test")

    def alone(self, name: str, rows: Numbers, phases: Sequence[Tables], **more: Any) -> Summary:
        """Runs phases at one party that has these rows with their labels."""
        source = {"source": self.source(name, rows, labels=True), "label": "label", "split": "part"}
        parties = [{"name": OWNER, "role": "active"}]
        return self.run(
            name,
            {"parties": parties, "rows": {"split": "column"}, "phases": [*phases], **more},
            {OWNER: source},
        )

    def together(
        self, name: str, parts: Sequence[Numbers], phases: Sequence[Tables], **more: Any
    ) -> Summary:
        """Runs phases at clients, and at a party with the labels."""
        names = [f"client{number}" for number in range(1, len(parts) + 1)]
        parties: list[Tables] = [{"name": OWNER, "role": "active", "features": False}]
        parties += [{"name": each, "role": "passive"} for each in names]
        labels = self.source(f"{name}-labels", self.everything, labels=True, pixels=False)
        data: dict[str, Tables] = {OWNER: {"source": labels, "label": "label", "columns": []}}
        for each, rows in zip(names, parts, strict=True):
            data[each] = {"source": self.source(f"{name}-{each}", rows), "split": "part"}
        rows_ = {"align": "none", "split": "column"}
        return self.run(
            name, {"parties": parties, "rows": rows_, "phases": [*phases], **more}, data
        )


def bytes_of(bench: Bench, name: str, phase: Tables, parts: Sequence[Numbers]) -> Tables:
    """Returns the ledger's payload of all clients beside the paper's formula (appendix A.5), in
    MB.
    """
    recipe = Recipe.model_validate(
        {
            "name": "bytes",
            "task": {"kind": "multiclass", "classes": CLASSES},
            "parties": [{"name": OWNER, "role": "active"}],
            "model": bench.model(),
            "phases": [phase],
        }
    )
    settings = MocoSFLSettings.model_validate(
        {key: value for key, value in phase.items() if key != "kind"}
    )
    latent = 4 * int(np.prod(build_halves(recipe, settings).latent))
    weights = 4 * sum(each.numel() for each in build_bottom(recipe, settings).parameters())
    train = sum(int((bench.images.part[rows] == "train").sum()) for rows in parts)
    syncs = 0 if settings.frozen else settings.epochs * settings.averages_per_epoch * len(parts)
    ways = 1 if settings.frozen else 2
    counted = bench.done[name].bytes.by_phase["mocosfl"].payload_bytes
    paper = ways * latent * train * settings.epochs + weights * syncs
    return {"counted": counted / 1e6, "paper": paper / 1e6, "ratio": counted / paper}


CNN: Tables = {"kind": "cnn", "channels": [32, 64, 128, 256]}
PROBE: Tables = {"kind": "probe", "splits": ["test"]}


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--dataset", type=click.Choice([*DATASETS]), default="cifar10")
@click.option("--images", default=5000, help="Training images.")
@click.option("--tests", default=2000, help="Test images.")
@click.option("--epochs", default=30)
@click.option("--clients", default=5)
@click.option("--network", type=click.Choice(["cnn", "resnet18"]), default="cnn")
@click.option("--rate", default=0.06, help="Learning rate.")
@click.option("--averages", default=1, help="Averages an epoch.")
@click.option(
    "--bottoms",
    default=1.0,
    help="Times the rate, and 1/times the decay, of the bottoms of several clients.",
)
@click.option("--seed", default=1)
@click.option(
    "--others", default=1000, help="Images that no client has, for TAResSFL and the attacker."
)
@click.option("--others-epochs", default=30, help="Epochs over these.")
@click.option("--attack-epochs", default=30)
@click.option(
    "--pictures",
    type=click.Path(path_type=Path, exists=True),
    help="A folder for those of the attack.",
)
@click.option("--device", default="cpu")
@click.option("--threads", default=2)
@click.option(
    "--validate", is_flag=True, help="Score images that are no test images, to choose settings."
)
@click.option("--only", multiple=True, help="Lines to run; all by default.")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    data: Path,
    dataset: str,
    images: int,
    tests: int,
    epochs: int,
    clients: int,
    network: str,
    rate: float,
    averages: int,
    bottoms: float,
    seed: int,
    others: int,
    others_epochs: int,
    attack_epochs: int,
    pictures: Path | None,
    device: str,
    threads: int,
    validate: bool,
    only: tuple[str, ...],
    output: Path | None,
) -> None:
    """Scores MocoSFL beside its three baselines."""
    found = DATASETS[dataset](data, images, tests, others, validate=validate)
    encoder, features = (CNN, 256) if network == "cnn" else ({"kind": "resnet18"}, 512)
    queue = min(6000, images // clients // 2)
    optimizer: Tables = {
        "kind": "sgd",
        "lr": rate,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "schedule": "cosine",
    }
    height, width, channels = found.pixels.shape[1:]
    moco = {
        "kind": "mocosfl",
        "image": [channels, height, width],
        "cut": 1,
        "epochs": epochs,
        "queue": queue,
        "optimizer": optimizer,
        # As the results were measured.
        "query": "view",
        "augment": {
            "blur": 0.0,
            "flip": 0.5 if dataset == "cifar10" else 0.0,
            "jitter": 0.8 if channels == 3 else 0.0,
        },
    }
    if channels == 1:
        moco["augment"]["grayscale"] = 0.0
    together: Tables = {"batch_size": 100 // clients, "averages_per_epoch": averages}
    if bottoms != 1.0:
        of_bottoms = {"lr": rate * bottoms, "weight_decay": optimizer["weight_decay"] / bottoms}
        together["bottom_optimizer"] = optimizer | of_bottoms
    wanted = only or (
        "random",
        "one1",
        "one3",
        "iid1",
        "iid3",
        "classes1",
        "classes3",
        "alone",
        "taressfl",
        "inversion",
    )
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            found, Path(folder), clients, encoder, features, moco, seed, device, threads, pictures
        )
        parts = {scheme: dealt(found, clients, scheme, seed) for scheme in ("iid", "classes")}
        if "random" in wanted:
            still = moco | {"epochs": 1, "batch_size": 100, "optimizer": optimizer | {"lr": 1e-30}}
            results["random"] = accuracies(bench.alone("random", bench.everything, [still, PROBE]))
        # Below the cut, only one term of the loss gives a gradient.
        for cut in (1, 3):
            if (name := f"one{cut}") in wanted:
                phase = moco | {"batch_size": 100, "cut": cut}
                results[name] = accuracies(bench.alone(name, bench.everything, [phase, PROBE]))
        for scheme in ("iid", "classes"):
            for cut in (1, 3):
                name = f"{scheme}{cut}"
                if name in wanted:
                    phase = moco | together | {"cut": cut}
                    summary = bench.together(name, parts[scheme], [phase, PROBE])
                    results[name] = accuracies(summary) | bytes_of(
                        bench, name, phase, parts[scheme]
                    )
        if "taressfl" in wanted:
            phase = moco | together
            results["taressfl"] = taressfl(
                bench, parts["iid"], bench.rows("other"), phase, others_epochs
            )
        if "inversion" in wanted:
            mine = np.intersect1d(parts["iid"][0], bench.rows("train"))
            for name in ("iid1", "iid3", "taressfl"):
                if name in results:
                    results[name] |= inverted(bench, name, mine, bench.rows("other"), attack_epochs)
        if "alone" in wanted:
            for scheme in ("iid", "classes"):
                results[f"alone {scheme}"] = by_themselves(bench, scheme, parts[scheme])
    show(
        results,
        f"{dataset}, {images:,} training images, {clients} clients, {network}, {epochs} "
        f"epochs, seed {seed}",
    )
    if output is not None:
        output.write_text(json.dumps(results, indent=1) + "\n")


def taressfl(
    bench: Bench, parts: Sequence[Numbers], source: Numbers, phase: Tables, epochs: int
) -> Tables:
    """Trains a bottom that resists inversion on images of ``source``, and the tail of clients that
    have it frozen.
    """
    # Where latents still are large, as the paper's.
    cut = 3 if bench.encoder["kind"] == "resnet18" else 1
    neck: Tables = {"cut": cut, "bottleneck": {"channels": 4, "stride": 2}}
    before = bench.moco | neck | {"batch_size": 100, "epochs": epochs, "resist": {}}
    bench.alone("resistant", source, [before])
    ssim = json.loads(
        (bench.folder / "resistant" / OWNER / "metrics.jsonl").read_text().splitlines()[-1]
    )
    print(
        f"resistant: SSIM of the decoder's images {ssim['metrics']['train']['ssim']:.3f} "
        "in the last epoch",
        flush=True,
    )
    trained = ("averages_per_epoch", "bottom_optimizer")
    still = {key: each for key, each in (phase | neck).items() if key not in trained}
    start = {"run": "resistant", "held_by": "active", "phases": [before]}
    still["frozen"] = True
    found = bench.together("taressfl", parts, [still, PROBE], start=start)
    return accuracies(found) | bytes_of(bench, "taressfl", still, parts)


def inverted(bench: Bench, name: str, rows: Numbers, known: Numbers, epochs: int) -> Tables:
    """Attacks the first client's bottom of a run with other images; ``rows``: of its own training
    images.
    """
    bottom = Model.load(bench.folder / name, "client1")

    def pairs(of: Numbers) -> LatentPairs:
        images = to_unit(bench.images.pixels[of].transpose(0, 3, 1, 2))
        return LatentPairs(bottom.embed(images), torch.from_numpy(images))

    began = time.monotonic()
    found = invert(
        pairs(known),
        pairs(rows[:PRIVATE_IMAGES]),
        InversionSettings(epochs=epochs, seed=bench.seed),
    )
    print(f"inversion of {name}: {found.found} after {time.monotonic() - began:.0f} s", flush=True)
    if bench.pictures is not None:
        truth = [("truth", found.truth), ("reconstruction", found.images)]
        picture = draw_pairs(truth, f"Model inversion of {name}, MSE {found.found.mse:.4f}")
        (bench.pictures / f"inversion-{name}.png").write_bytes(picture)
    return {"mse": found.found.mse, "ssim": found.found.ssim, "mean image": found.baseline.mse}


def accuracies(summary: Summary) -> Tables:
    """Returns the accuracy on the test images of the probe and of the neighbours' vote, in per
    cent.
    """
    metrics = summary.metrics
    return {
        "probe": 100 * metrics["test"]["accuracy"],
        "neighbours": 100 * metrics["test by neighbours"]["accuracy"],
    }


def by_themselves(bench: Bench, scheme: str, parts: Sequence[Numbers]) -> Tables:
    """Trains each client alone; its features are probed with its own labels, and with all labelled
    images.
    """
    phase = bench.moco | {"batch_size": min(100, 100 // bench.clients)}
    tests = np.flatnonzero(bench.images.part == "test")
    own, whole = [], []
    for number, rows in enumerate(parts, 1):
        mine = np.union1d(rows[bench.images.part[rows] == "train"], tests)
        name = f"alone-{scheme}-{number}"
        own.append(accuracies(bench.alone(name, mine, [phase, PROBE])))
        start = {"run": name, "phases": [phase]}
        whole.append(
            accuracies(bench.alone(f"{name}-probed", bench.everything, [PROBE], start=start))
        )
    return {
        "own labels": float(np.mean([each["probe"] for each in own])),
        "probe": float(np.mean([each["probe"] for each in whole])),
        "neighbours": float(np.mean([each["neighbours"] for each in whole])),
    }


def show(results: dict[str, Tables], title: str) -> None:
    table = Table(title=title, title_justify="left")
    headings = (
        "probe %",
        "neighbours %",
        "own labels %",
        "counted MB",
        "paper's formula MB",
        "ratio",
        "attack MSE",
        "SSIM",
    )
    for column in ("line", *headings):
        table.add_column(column, justify="left" if column == "line" else "right")
    for name, each in results.items():
        cells = [
            each.get(key)
            for key in ("probe", "neighbours", "own labels", "counted", "paper", "ratio")
        ]
        shown = ["–" if cell is None else f"{cell:.2f}" for cell in cells]
        table.add_row(
            name,
            *shown,
            *("–" if each.get(key) is None else f"{each[key]:.4f}" for key in ("mse", "ssim")),
        )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
