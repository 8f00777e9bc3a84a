"""A slice of scripts/try-kills: deaths at named moments, and the same parameters, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import kills
from tests.harness.federation import Federation
from tests.integration.test_resume import Parameters, assert_equal, parameters


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Parameters:
    with Federation(tmp_path_factory.mktemp("undisturbed"), kills.recipe(), kills.DATA) as federation:
        federation.start_all()
        federation.finish()
        return parameters(federation)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return kills.plugged(tmp_path_factory.mktemp("site"))


@pytest.mark.parametrize(
    ("who", "moment"),
    [
        ("passive", "start-received"),
        ("active", "after-mid-epoch"),
        ("all", "checkpoint-half"),
        ("two", "before-evaluation"),
        ("active", "report-sent"),
        ("server", "before-told"),
        ("server", "before-finished"),
    ],
)
def test_the_run_ends_as_undisturbed(
    who: str, moment: str, tmp_path: Path, plugin: dict[str, str], undisturbed: Parameters
) -> None:
    assert (who, moment) in set(kills.cells())
    assert_equal(parameters(kills.run(tmp_path, plugin, kills.VICTIMS[who], moment)), undisturbed)
