"""``python -m vfl_leaks.invert``: feature reconstruction of a party's training images from its
bottom model, after a run.

Nothing leaves this machine: the party attacks itself, as an honest-but-curious server could.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as Lines
from torch import Tensor, nn

from vfl_common.config.base import parse, read_toml
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.config.sources import resolve_source
from vfl_common.errors import Code, InputError
from vfl_common.files import private_file, write_atomic
from vfl_common.process.program import EXIT_CODES, run_program
from vfl_common.text import to_json
from vfl_leaks.inversion import (
    MAX_IMAGES,
    PRIVATE_IMAGES,
    InversionSettings,
    Inverted,
    LatentPairs,
    invert,
)
from vfl_party.assembly.models import build_models, load_models
from vfl_party.assembly.party import TRAINING, expect_rows, open_party
from vfl_party.base.devices import plain_arithmetic, resolve_device
from vfl_party.base.seeds import Rows, derive_seed, draw_permutation
from vfl_party.data import Features, Preprocessor, Table, load_table
from vfl_party.data.pixels import to_unit
from vfl_party.data.row_arrays import parts_of, release
from vfl_party.data.rows import Prepared
from vfl_party.methods.mocosfl.resist import get_window_size
from vfl_party.models import forward
from vfl_party.phases.context import MakeEncoder
from vfl_party.phases.course import Course
from vfl_party.predict.run import TrainedRun, load_trained

# Batch size of the bottom model.
_AT_ONCE = 256
# Maximum distance of a pixel from the range 0 to 1, after scaling by the range of the party.
_OUTSIDE = 0.25
# Seconds between two lines of progress when the output is not a terminal.
_SAY_S = 10.0
# Width in characters when the output is not a terminal.
_PIPE_WIDTH = 120
_FAILED = (
    "The attack failed: the mean image has a smaller error than the reconstructions. That does not "
    "show that the images are private, because the decoder may need more training. Give more "
    "--epochs, or more auxiliary images."
)
_BETTER = (
    "A larger mean squared error means better privacy. The mean image is what an attacker has "
    "without latents."
)


@dataclass(frozen=True, eq=False)
class Report:
    """The result of an attack. ``about``: facts about the attack, for JSON."""

    about: dict[str, Any]
    inverted: Inverted

    def as_json(self) -> dict[str, Any]:
        """Returns the result without the images."""
        inverted = self.inverted
        measured = {
            "reconstruction": asdict(inverted.found),
            "mean_image": asdict(inverted.baseline),
        }
        return (
            self.about | measured | {"trained_mse": inverted.trained_mse, "failed": inverted.failed}
        )


def attack(
    run: Path,
    party: str,
    data: DataSettings,
    auxiliary: DataSettings,
    settings: InversionSettings,
    *,
    device: torch.device,
    progress: Callable[[int, int, float], None],
) -> Report:
    """Attacks the bottom model in the party's folder of a finished run.

    Args:
        run: the run's folder, or the party's folder in it.
        party: the party whose bottom model and images are attacked.
        data: the party's data in that run.
        auxiliary: the attacker's images; images that the party also has are left out.
        settings: how the decoder is trained.
        device: the device of the bottom model and the decoder.
        progress: called after each epoch.

    Raises InputError.
    """
    trained = load_trained(run, party)
    if trained.recipe.rows.align == "none" and "scale" not in data.model_fields_set:
        # A source without settings has no scale, so the usual scale is assumed.
        data = data.model_copy(update={"scale": "minmax"})
    place = trained.recipe.party(party)
    if place is not None and not place.features:
        raise _no_images(party)
    prepared = _prepare_rows(trained, party, data)
    preprocessor, features = prepared.preprocessor, prepared.features
    if preprocessor is None or features is None or preprocessor.image_shape is None:
        raise _no_images(party)
    make = MakeEncoder(trained.recipe, party, trained.encoder, preprocessor.spec)
    models = build_models(Course(trained.recipe), party, make)
    load_models(models, trained.state)
    bottom = models["encoder"].to(device).eval()

    def make_pairs(table: Table, features: Features, rows: Rows) -> LatentPairs:
        latents = _latents(bottom, features, rows, trained.recipe, device)
        if latents.dim() not in (2, 4):
            raise InputError(
                Code.MODEL_INVALID,
                f"{party}: its encoder must return latents [C, H, W] or [D] per row (got "
                f"{list(latents.shape[1:])}). Attack a party with such an encoder.",
            )
        return LatentPairs(
            latents, torch.from_numpy(_pixels(table, rows, features if scaled else None))
        )

    local = prepared.splits["local"]
    # Rows from data.unaligned come after the table's rows.
    local = local[local < len(prepared.table)]
    private_rows = _draw_rows(local, PRIVATE_IMAGES, settings.seed, "private")
    scaled = data.scale == "minmax" and not _is_unit(prepared.table, private_rows)
    private = make_pairs(prepared.table, features, private_rows)
    auxiliary_table, left_out = _read_auxiliary(
        auxiliary, preprocessor, prepared.table, settings.seed
    )
    auxiliary_pairs = make_pairs(
        auxiliary_table,
        preprocessor.transform(auxiliary_table),
        np.arange(len(auxiliary_table), dtype=np.int64),
    )
    about = {
        "run_id": trained.run_id,
        "party": party,
        "recipe_digest": trained.recipe.digest(),
        **_describe_depth(trained.recipe),
        "latent": list(private.latent),
        "image": list(private.image),
        "auxiliary": {
            "source": auxiliary_table.source,
            "images": len(auxiliary_pairs),
            "left_out": left_out,
        },
        "private": {"images": len(private), "training_rows": len(local)},
        "settings": asdict(settings),
        "ssim_window": get_window_size(*private.image[1:]),
    }
    return Report(
        about, invert(auxiliary_pairs, private, settings, device=device, progress=progress)
    )


def _no_images(party: str) -> InputError:
    return InputError(
        Code.DATA_INVALID, f"{party}: its rows are not images. Attack a party with images."
    )


def _prepare_rows(trained: TrainedRun, party: str, data: DataSettings) -> Prepared:
    """Returns the party's rows. Raises InputError if they are not the rows of the run."""
    opened = open_party(trained.recipe, party, data, trained.encoder)
    prepared = TRAINING.prepare(opened, expect_rows(opened))
    if prepared.fingerprint != trained.state["data"]:
        raise InputError(
            Code.DATA_INVALID,
            f"{opened.table.source}: its rows are not the rows that {party} used in "
            f"{trained.run_id}. Give the data of that run.",
        )
    return prepared


def _read_auxiliary(
    settings: DataSettings, preprocessor: Preprocessor, private: Table, seed: int
) -> tuple[Table, int]:
    """Reads the attacker's images. Returns them, and the number of images that are left out because
    the party also has them.

    Raises InputError if the images cannot be used.
    """
    shape = preprocessor.image_shape
    if settings.is_table and settings.image_shape is None and settings.view is None:
        settings = settings.model_copy(update={"image_shape": shape})
    table = load_table(settings, with_label=False)
    images = table.images_NCHW
    if images is None or images.shape[1:] != shape:
        raise InputError(
            Code.DATA_INVALID,
            f"{table.source}: must have images of {_format_shape(shape or ())} (channels x height "
            "x width), as the party has (got "
            f"{'no images' if images is None else _format_shape(images.shape[1:])}). Give such "
            "images.",
        )
    private_digests = set(_hash_images(private))
    unknown = np.array(
        [row for row, digest in enumerate(_hash_images(table)) if digest not in private_digests],
        np.int64,
    )
    if len(unknown) < 2:
        raise InputError(
            Code.DATA_INVALID,
            f"{table.source}: must have at least 2 images that are not the party's (got "
            f"{len(unknown)} of {len(images)}). Add images.",
        )
    return table.select(_draw_rows(unknown, MAX_IMAGES, seed, "auxiliary")), len(images) - len(
        unknown
    )


def _hash_images(table: Table) -> Iterator[bytes]:
    """Yields a hash of the pixels of each image."""
    if table.images_NCHW is not None:
        for part in parts_of(table.images_NCHW):
            for image in to_unit(table.images_NCHW[part]):
                yield hashlib.sha256(image).digest()
            release(table.images_NCHW)


def _draw_rows(rows: Rows, max_rows: int, seed: int, name: str) -> Rows:
    """Draws at most ``max_rows`` of the rows by the seed, and returns them in ascending order."""
    return np.sort(rows[draw_permutation(derive_seed(seed, name), len(rows))[:max_rows]])


def _is_unit(table: Table, rows: Rows) -> bool:
    """Whether no pixel of the rows is below 0 or above 1."""
    images = table.pixels(rows)
    return not bool(((images < 0.0) | (images > 1.0)).any())


def _pixels(table: Table, rows: Rows, scaled: Features | None) -> npt.NDArray[np.float32]:
    """Returns the images of rows, [N, C, H, W], with pixels from 0 to 1.

    ``scaled``: the inputs of the bottom model, which replace the images if the party's pixels are
    not from 0 to 1; otherwise None. Raises InputError if the images are too small, or their pixels
    have another scale.
    """
    source, images = table.source, table.pixels(rows)
    if min(images.shape[2:]) < 2:
        raise InputError(
            Code.DATA_INVALID,
            f"{source}: its images are too small to compare (got "
            f"{_format_shape(images.shape[1:])}). Give images of at least 2 x 2 pixels.",
        )
    if scaled is not None and not bool(np.isnan(images).any()):
        images = np.ascontiguousarray(scaled.inputs(rows)[0].numpy())
        if _is_unit(table, rows) or images.min() < -_OUTSIDE or images.max() > 1.0 + _OUTSIDE:
            raise InputError(
                Code.DATA_INVALID,
                f"{source}: its pixels have another scale than the party's. Give images with "
                "pixels on the scale of the party's images.",
            )
        return images.clip(0.0, 1.0)
    # A missing pixel (NaN) also fails these comparisons.
    if not bool(((images >= 0.0) & (images <= 1.0)).all()):
        raise InputError(
            Code.DATA_INVALID,
            f"{source}: some pixels are missing, or not from 0 to 1. Give bytes (0 to 255), or "
            "numbers from 0 to 1.",
        )
    return images


@torch.no_grad()
def _latents(
    bottom: nn.Module, features: Features, rows: Rows, recipe: Recipe, device: torch.device
) -> Tensor:
    parts = [rows[start : start + _AT_ONCE] for start in range(0, len(rows), _AT_ONCE)]
    inputs = ((input_.to(device) for input_ in features.inputs(part)) for part in parts)
    return torch.cat(
        [forward(bottom, *input_, precision=recipe.model.precision).cpu() for input_ in inputs]
    )


def _describe_depth(recipe: Recipe) -> dict[str, Any]:
    """Returns the number of convolutions of the bottom model and its bottleneck; None if the
    encoder is not a cut network.
    """
    course = Course(recipe)
    for phase in (*course.before, *course.phases):
        settings = phase.settings
        if hasattr(settings, "cut"):
            neck = getattr(settings, "bottleneck", None)
            return {
                "cut": settings.cut,
                "bottleneck": None if neck is None else f"C{neck.channels}S{neck.stride}",
            }
    return {"cut": None, "bottleneck": None}


def _format_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def read_data(text: str, option: str, party: str | None = None) -> DataSettings:
    """Reads an option that names data: a source, or a TOML file with the keys of [data], such as a
    party file.

    Raises InputError if the text is not valid, or names the party file of a party other than
    ``party``.
    """
    if not text.lower().endswith(".toml"):
        return parse(DataSettings, {"source": resolve_source(text, Path())}, option)
    path = Path(text)
    tables = read_toml(path)
    name = tables.get("name")
    if party is not None and name not in (None, party):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{path}: is not the party file of {party} (got {name}). Give the file of {party}.",
        )
    where = f"{path}: data" if "data" in tables else str(path)
    return parse(DataSettings, tables.get("data", tables), where).absolute(path.resolve().parent)


def make_title(report: Report) -> str:
    """Returns a title with the party, the depth of its bottom model, and the auxiliary images."""
    about, auxiliary = report.about, report.about["auxiliary"]
    neck = f" and bottleneck {about['bottleneck']}" if about["bottleneck"] else ""
    cut = f"cut = {about['cut']}{neck}" if about["cut"] is not None else "whole encoder"
    depth = f"{cut}, latents of {_format_shape(tuple(about['latent']))}"
    known = f"{auxiliary['images']:,} auxiliary images of {Path(auxiliary['source']).name}"
    return f"Model inversion of {about['party']} in {about['run_id']}\n{depth}; {known}"


def show(report: Report, console: Console) -> None:
    """Prints the result as a table."""
    about, inverted = report.about, report.inverted
    console.print(make_title(report), style="bold")
    lines = Lines(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    lines.add_column(f"{about['private']['images']} training images against")
    for heading in ("MSE", "SSIM", "PSNR (dB)"):
        lines.add_column(heading, justify="right")
    for name, likeness in (
        ("their reconstructions", inverted.found),
        ("the mean auxiliary image", inverted.baseline),
    ):
        lines.add_row(name, f"{likeness.mse:.5f}", f"{likeness.ssim:.3f}", f"{likeness.psnr:.2f}")
    console.print(lines)
    left_out = about["auxiliary"]["left_out"]
    own = (
        f"\n{left_out:,} auxiliary images were left out because they are the party's."
        if left_out
        else ""
    )
    if inverted.failed:
        console.print(f"\n{_FAILED}", style="yellow")
    console.print(f"\n{_BETTER}{own}", style="dim")


def write(report: Report, out: Path) -> Path:
    """Writes the JSON file, and next to it a picture that only its owner may read.

    Returns the path of the picture. Raises InputError.
    """
    from vfl_leaks.picture import draw_pairs

    inverted, picture = report.inverted, out.with_suffix(".png")
    mse = f"MSE {inverted.found.mse:.4f}; with the mean auxiliary image {inverted.baseline.mse:.4f}"
    rows = [("truth", inverted.truth), ("reconstruction", inverted.images)]
    png = draw_pairs(rows, f"{make_title(report)}\n{mse}")
    with private_file(picture) as file:
        file.write(png)
    write_atomic(out, to_json(report.as_json()) + "\n")
    return picture


@click.command(epilog=EXIT_CODES)
@click.option(
    "--run",
    required=True,
    type=click.Path(path_type=Path),
    help="Attack this finished run: OUT/RUN-ID.",
)
@click.option("--party", required=True, metavar="NAME", help="Attack the images of this party.")
@click.option(
    "--data",
    required=True,
    metavar="DATA",
    help="Read the party's images in that run from DATA.",
)
@click.option(
    "--auxiliary",
    required=True,
    metavar="DATA",
    help="Read the attacker's images from DATA.",
)
@click.option(
    "--out",
    default="inversion.json",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Write figures to this file, and the picture next to it.",
)
@click.option(
    "--epochs", default=InversionSettings.epochs, show_default=True, type=click.IntRange(1, 100_000)
)
@click.option(
    "--seed", default=InversionSettings.seed, show_default=True, type=click.IntRange(0, 2**62)
)
@click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda|cuda:N")
def cli(
    run: Path, party: str, data: str, auxiliary: str, out: Path, epochs: int, seed: int, device: str
) -> None:
    """Attack a party's bottom model by model inversion.

    The command shows how well training images can be reconstructed. A decoder learns to invert the
    bottom model from at most 10,000 auxiliary images. Then it reconstructs 128 training images of
    the party. DATA is a source, such as data.source of a party file, or a TOML file with the keys of
    [data], such as a party file.

    \b
    Example:
      python -m vfl_leaks.invert --run runs/RUN-ID --party north --data north.toml --auxiliary public.npz
    """  # noqa: E501
    if out.suffix != ".json":
        raise InputError(
            Code.FILE_INVALID, f"--out: must end in .json (got {out}). Give such a file name."
        )
    if not out.absolute().parent.is_dir():
        raise InputError(
            Code.FILE_INVALID,
            f"{out}: its folder does not exist. Create it, or give another --out.",
        )
    plain_arithmetic()
    resolved_device, settings = resolve_device(device), InversionSettings(epochs=epochs, seed=seed)
    sources = read_data(data, "--data", party), read_data(auxiliary, "--auxiliary")
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress_bars:
        bar = progress_bars.add_task("training the decoder", total=epochs)

        shown_s = time.monotonic()

        def show_progress(done: int, _epochs: int, mse: float) -> None:
            nonlocal shown_s
            progress_bars.update(
                bar, completed=done, description=f"training the decoder: MSE {mse:.5f}"
            )
            if not errors.is_terminal and (done == 1 or time.monotonic() - shown_s > _SAY_S):
                shown_s = time.monotonic()
                click.echo(
                    f"training the decoder: epoch {done} of {epochs}, MSE {mse:.5f}", err=True
                )

        report = attack(
            run, party, *sources, settings, device=resolved_device, progress=show_progress
        )
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
    show(report, console)
    picture = write(report, out)
    click.echo(f"{out}\n{picture}")


def main() -> None:
    """Runs the program."""
    run_program(cli, "python -m vfl_leaks.invert", private=True)


if __name__ == "__main__":
    main()
