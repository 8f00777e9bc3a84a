"""Prints the result of ``vfl leaks`` as a table, and writes its pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import click

from vfl.summary.table import wide_console
from vfl_common.errors import Code, InputError
from vfl_common.files import private_file, write_atomic
from vfl_common.text import to_json
from vfl_leaks.report.result import Rehearsed
from vfl_leaks.report.result import as_json as written
from vfl_leaks.report.table import WIDTH, render

T = TypeVar("T")


def show_leaks(results: Sequence[Rehearsed], *, as_json: bool, out: Path | None) -> None:
    """Prints the results. With ``out``, also writes leaks.json, leaks.png and pictures of private
    images to this folder. Only their owner may read the pictures of private images.
    """
    if as_json:
        click.echo(to_json(written(results), compact=True))
    else:
        wide_console(WIDTH).print(render(results))
    if out is not None:
        from vfl_leaks.report.picture import draw, draw_images

        write_atomic(out / "leaks.json", to_json(written(results)) + "\n")
        written_to = [out / "leaks.json"]
        if any(result.lines for result in results):
            draw(results).savefig(out / "leaks.png", dpi=130)
            written_to.append(out / "leaks.png")
        for name, png in draw_images(results).items():
            with private_file(out / name) as file:
                file.write(png)
            written_to.append(out / name)
        if not as_json:
            click.echo("\n".join(map(str, written_to)))


def read_list(text: str | None, option: str, parse_item: Callable[[str], T]) -> Sequence[T] | None:
    """Parses a list such as ``a,b``; None stays None. Raises InputError."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        items = [parse_item(word) for word in words]
    except ValueError:
        items = []
    if not items:
        example = "1,2,3" if parse_item is int else "norm,cosine"
        raise InputError(
            Code.CONFIG_INVALID,
            f"{option}: is not a valid list (got {text!r}). Give a list such as {example}.",
        )
    return items
