"""Notes about what can be run, and is perhaps not meant."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.errors import assert_names
from vfl_common.config.data import DataSettings
from vfl_party.phases.advice import warn_few_rows, warn_label_taken


@pytest.mark.parametrize(
    ("rows", "classes", "least"),
    [
        (49, 0, 50),
        (49, 2, 50),
        (50, 2, None),
        (50, 0, None),
        (50, 6, 60),
        (60, 6, None),
        (1_999, 200, "2,000"),
    ],
)
def test_few_rows_are_fewer_than_fifty_or_ten_for_each_class(
    rows: int, classes: int, least: object
) -> None:
    text = warn_few_rows(rows, classes)
    if least is None:
        assert text == ""
    else:
        assert_names(text, "50", "10")


@pytest.mark.parametrize(
    ("keys", "taken"),
    [
        ({"source": "shop.csv", "label": "sex"}, True),
        ({"source": "shop.csv"}, False),
        ({"source": "sklearn:digits", "label": "target"}, False),
        (
            {
                "source": "all.csv",
                "label": "sex",
                "view": {"scheme": "columns", "part": 0, "parts": 2},
            },
            False,
        ),
    ],
)
def test_a_label_of_a_passive_party_takes_a_column(keys: dict[str, Any], taken: bool) -> None:
    text = warn_label_taken("shop", DataSettings.model_validate(keys))
    wanted = "shop is passive: data.label = 'sex' takes that column out of its features; use data.drop for that, or"
    assert text.startswith(wanted) if taken else text == ""
