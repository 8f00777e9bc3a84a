"""Images from embeddings: ``python -m benchmarks.leaks --only images --data DIR``.

Split training of four parties, each of which has a quarter of every image: scikit-learn's digits as
in ``examples/digits.toml``, and MNIST-10k, plain and with defences: embeddings of 8 numbers,
NoPeek, MID.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import vfl
from vfl_common.text import to_json
from vfl_leaks.result import AttackLine, Rehearsed, as_json

RESULTS = Path(__file__).parent / "results" / "leaks-images"
EXAMPLE = Path(__file__).parents[1] / "examples" / "digits.toml"
Tables = dict[str, Any]


def mnist(data: Path, *, epochs: int, width: int = 32, **defence: float) -> Tables:
    """Makes a recipe of split training on the quarters of MNIST-10k: MLPs, embeddings of 32
    numbers.
    """
    names = ("upper-left", "upper-right", "lower-left", "lower-right")
    optimizer = {"kind": "adam", "lr": 0.001}
    return {
        "name": "-".join(
            [
                "mnist-10k",
                *([] if width == 32 else [f"width{width}"]),
                *map(_named, defence.items()),
            ]
        ),
        "task": {"kind": "multiclass", "classes": 10},
        "parties": [
            {"name": name, "role": "passive" if number else "active"}
            for number, name in enumerate(names)
        ],
        "rows": {"validation": 0.1, "test": 0.2},
        "model": {
            "embedding_size": width,
            "encoder": {"kind": "mlp", "hidden": [128]},
            "top": {"hidden": [64]},
        },
        "phases": [
            {"kind": "splitnn", "epochs": epochs, "batch_size": 128, "optimizer": optimizer}
            | defence,
            {"kind": "evaluate"},
        ],
        "simulate": {
            "scheme": "quadrants",
            "data": {"source": str(data.resolve() / "mnist10k.npz"), "label": "labels"},
        },
    }


def _named(term: tuple[str, float]) -> str:
    return f"{term[0]}{term[1]:g}"


def run(data: Path, seeds: Sequence[int], *, quick: bool, console: Console) -> None:
    """Attacks both, and writes the table after each."""
    digits = vfl.Recipe.of(EXAMPLE)
    found: list[Rehearsed] = []
    epochs = 1 if quick else 10
    defended = [mnist(data, epochs=epochs, nopeek=weight) for weight in (0.1, 1.0)]
    defended += [mnist(data, epochs=epochs, mid=weight) for weight in (0.0001, 0.001, 0.01)]
    for each in (
        digits,
        mnist(data, epochs=epochs),
        mnist(data, epochs=epochs, width=8),
        *defended,
    ):
        found += vfl.leaks(each, attacks=["images"], seeds=seeds, quiet=True).found
        console.print(f"{found[-1].name}: {found[-1].metric} {found[-1].utility}")
        if not quick:
            RESULTS.with_suffix(".md").write_text(written(found))
            RESULTS.with_suffix(".json").write_text(to_json(as_json(found)) + "\n")
    console.print(written(found), markup=False)


def written(found: Sequence[Rehearsed]) -> str:
    """Returns a Markdown table: a row for each party, exchange, and what is known."""
    lines = [
        "| images | party | from | known | unit | leak | mean image | own columns |",
        "| --- " * 8 + "|",
    ]
    for each in found:
        for line in each.lines:
            cells = (
                each.name,
                line.of.partition(":")[0],
                line.place,
                line.knows,
                line.unit,
                *_figures(line),
            )
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def _figures(line: AttackLine) -> Iterator[str]:
    yield str(line.value)
    for name in ("mean image", "own columns"):
        yield str(line.baselines.get(name, ""))
