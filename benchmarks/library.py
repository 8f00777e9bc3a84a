"""Time a study of many small runs: ``python -m benchmarks.library [--runs N]``.

The same recipe with other seeds, one run at a time and several: through the library, with all
parties of a run in one process, and as ``vfl study`` runs it, with processes that are forked from
one that has imported torch. All times include importing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from vfl.simulation.federation import to_toml
from vfl_common.config.base import read_toml

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 1800.0
LIBRARY = """
import sys, vfl
runs, jobs = int(sys.argv[2]), int(sys.argv[3])
print(vfl.study(vfl.Recipe.load(sys.argv[1]), {"seed": range(runs)}, quiet=True, jobs=jobs).columns()["test auc"])
"""


@click.command(help=__doc__)
@click.option(
    "--recipe",
    default=str(ROOT / "examples" / "breast-cancer.toml"),
    type=click.Path(path_type=Path),
)
@click.option("--runs", default=20, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--jobs", default=(1, 2), show_default=True, multiple=True, type=click.IntRange(min=1)
)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
def main(recipe: Path, runs: int, jobs: tuple[int, ...], repeats: int) -> None:
    for turn in range(1, repeats + 1):
        for at_a_time in jobs:
            with tempfile.TemporaryDirectory() as place:
                study = Path(place) / "study.toml"
                tables = {
                    "name": "study",
                    "recipe": str(recipe.resolve()),
                    "seeds": list(range(runs)),
                }
                finetune = read_toml(recipe)["phases"]
                study.write_text(
                    to_toml(
                        tables
                        | {"metric": "auc", "methods": [{"name": "all", "finetune": finetune}]}
                    )
                )
                vfl = str(Path(sys.executable).with_name("vfl"))
                forked_s = _seconds(
                    [vfl, "study", str(study), "--out", place, "--json", "--jobs", str(at_a_time)]
                )
            library_s = _seconds(
                [sys.executable, "-c", LIBRARY, str(recipe), str(runs), str(at_a_time)]
            )
            click.echo(
                f"turn {turn}/{repeats}: {runs} runs, {at_a_time} at a time: vfl.study "
                f"{library_s:.1f} s, "
                f"vfl study {forked_s:.1f} s: {forked_s / library_s:.1f} times sooner"
            )


def _seconds(args: list[str]) -> float:
    began_s = time.monotonic()
    done = subprocess.run(args, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise click.ClickException(f"{args[0]} ended with {done.returncode}: {done.stderr[-1000:]}")
    return time.monotonic() - began_s


if __name__ == "__main__":
    main()
