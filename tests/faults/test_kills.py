"""A slice of scripts/try-kills: deaths at named moments, and the same parameters and predictions,
bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.harness import kills
from tests.harness.errors import assert_names
from tests.harness.federation import Federation
from tests.integration.test_resume import assert_equal, parameters


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    with Federation(
        tmp_path_factory.mktemp("undisturbed"), kills.recipe(), kills.DATA
    ) as federation:
        federation.start_all()
        federation.finish()
        return federation


def kept(federation: Federation) -> pa.Table:
    """The predictions that the run has left, in the only file of them."""
    (path,) = federation.run_folder.glob("*/*predictions*")
    assert path.parent.name == "p0"
    return pyarrow.parquet.read_table(path)


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
        ("active", "after-evaluation"),
        ("active", "report-sent"),
        ("server", "before-told"),
        ("server", "closing"),
        ("server", "before-finished"),
    ],
)
def test_the_run_ends_as_undisturbed(
    who: str, moment: str, tmp_path: Path, plugin: dict[str, str], undisturbed: Federation
) -> None:
    assert (who, moment) in set(kills.cells())
    ended = kills.run(tmp_path, plugin, who, moment)
    assert_equal(parameters(ended), parameters(undisturbed))
    assert kept(ended).equals(kept(undisturbed))


@pytest.fixture(scope="module", params=["cached", "skip"])
def lenient(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Federation]:
    """A late_policy, and a run with it in which nobody died."""
    policy: str = request.param
    with Federation(
        tmp_path_factory.mktemp(policy), kills.recipe(policy=policy), kills.DATA
    ) as federation:
        federation.start_all()
        federation.finish()
        return policy, federation


@pytest.mark.parametrize(
    ("who", "moment"),
    [
        ("server", "progress"),
        ("passive", "after-mid-epoch"),
        ("two", "checkpoint-named"),
        ("active", "checkpoint-unnamed"),
    ],
)
def test_with_a_late_policy_the_summary_names_what_differs(
    who: str, moment: str, tmp_path: Path, plugin: dict[str, str], lenient: tuple[str, Federation]
) -> None:
    policy, undisturbed = lenient
    assert (who, moment) in set(kills.cells(policy))
    ended = kills.run(tmp_path, plugin, who, moment, policy=policy)
    if not (kills.named(ended) or kills.named(undisturbed)):
        assert_equal(parameters(ended), parameters(undisturbed))


def test_a_defect_in_a_stream_s_thread_ends_the_run_with_the_name_of_who_has_it(
    tmp_path: Path, plugin: dict[str, str]
) -> None:
    with kills.Killed(tmp_path, kills.recipe(), kills.DATA) as federation:
        federation.plugin = plugin
        (tmp_path / "defect-p0").touch()
        for name in ("server", *kills.PARTIES):
            federation.start_one(name)
        codes = {name: program.wait(60.0) for name, program in federation.programs.items()}
        assert codes == {"server": 1, "p0": 1, "p1": 4, "p2": 4}
        told = {
            name: program.stderr.splitlines()[-1] for name, program in federation.programs.items()
        }
        for line in told.values():
            assert_names(line, "error: ")
        assert "TypeError" in told["p0"]
        for name in ("server", "p1", "p2"):
            assert "p0" in told[name]
            assert "TypeError" not in told[name]
        log = (federation.run_folder / "p0" / "log.jsonl").read_text()
        assert "Traceback" in log
        assert "in deliver" in log or "in _defect" in log
