"""The digests of a table: of all its columns and ids, and worth nothing without the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from vfl_common.config.data import DataSettings
from vfl_governance.grants.store import digests
from vfl_party.data import load_table

KEY = b"k" * 32
BEFORE = "id,age,town\n1,30,Aa\n2,40,Bb\n3,50,Aa\n"


class _Opened:
    """What ``digests`` looks at of a party's data."""

    unaligned = None

    def __init__(self, path: Path, text: str) -> None:
        path.write_text(text)
        self.table = load_table(DataSettings(source=str(path), id=("id",)), with_label=False)


def of(path: Path, text: str = BEFORE, key: bytes = KEY) -> tuple[str, str]:
    return digests(_Opened(path / "t.csv", text), key)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("after", "same"),
    [
        # Another order, and another value: the same table.
        ("id,age,town\n3,50,Aa\n1,30,Aa\n2,40,Bb\n", (True, True)),
        ("id,age,town\n1,31,Aa\n2,40,Bb\n3,50,Aa\n", (True, True)),
        ("id,age,town\n1,30,Aa\n2,40,Bb\n", (True, False)),
        ("id,age,town\n1,30,Aa\n2,40,Bb\n4,50,Aa\n", (True, False)),
        ("id,age,city\n1,30,Aa\n2,40,Bb\n3,50,Aa\n", (False, True)),
        ("id,age\n1,30\n2,40\n3,50\n", (False, True)),
        # A number that has become a category.
        ("id,age,town\n1,old,Aa\n2,new,Bb\n3,old,Aa\n", (False, True)),
    ],
)
def test_digests_are_of_columns_and_ids(
    after: str, same: tuple[bool, bool], tmp_path: Path
) -> None:
    old, new = of(tmp_path), of(tmp_path, after)
    assert tuple(one == other for one, other in zip(old, new, strict=True)) == same


def test_without_the_key_nothing_can_be_tried_out(tmp_path: Path) -> None:
    old, new = of(tmp_path), of(tmp_path, key=b"x" * 32)
    assert not {*old} & {*new}
