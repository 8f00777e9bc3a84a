"""deploy/observability: alerts and a dashboard, on metrics that the programs have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from vfl_common.config.recipe_tables import RunSettings

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "observability"
PAGE = ROOT / "docs" / "how-to" / "operate" / "monitor.md"
RULES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0][
    "rules"
]
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text())
PROMTOOL = shutil.which("promtool")
# A target's; Prometheus adds them.
ADDED = {"job", "instance", "le"}
# Metrics that Prometheus and node_exporter have.
OTHERS = {
    "up": set[str](),
    "node_systemd_unit_state": {"name", "state", "type"},
    "node_filesystem_avail_bytes": {"device", "fstype", "mountpoint"},
    "node_filesystem_size_bytes": {"device", "fstype", "mountpoint"},
}
METRIC = re.compile(r"\b(?:vfl_\w+|node_\w+|up(?={))")


def expressions() -> dict[str, list[str]]:
    """{where: its expressions}, with the dashboard's variables as Grafana replaces them."""
    found = {rule["alert"]: [rule["expr"]] for rule in RULES}
    for panel in DASHBOARD["panels"]:
        found[panel["title"]] = [
            target["expr"].replace("$__rate_interval", "1m") for target in panel.get("targets", [])
        ]
    found["variables"] = [
        re.sub(r"label_values\((.*), \w+\)", r"\1", each["query"]["query"])
        for each in DASHBOARD["templating"]["list"]
        if each["type"] == "query"
    ]
    return found


ALL = [expression for each in expressions().values() for expression in each]


def known() -> dict[str, set[str]]:
    """{metric: its labels}, as the page of metrics has them, which another test compares with the
    programs.
    """
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    found = dict(OTHERS)
    for names, labels in re.findall(r"^\| (`vfl_[^|]*)\|([^|]*)\|", page, re.MULTILINE):
        for name in re.findall(r"`(vfl_\w+)`", names):
            found[name] = set(re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", labels)))
    return found


def test_every_metric_is_one_that_the_programs_have() -> None:
    names = {name for each in ALL for name in METRIC.findall(each)}
    assert len(names) > 12
    assert {re.sub(r"_bucket$", "", name) for name in names} <= set(known())


@pytest.mark.parametrize("expression", ALL)
def test_every_label_is_one_that_the_metrics_have(expression: str) -> None:
    labels = {
        label
        for metric in METRIC.findall(expression)
        for label in known()[re.sub(r"_bucket$", "", metric)]
    }
    matched = set(re.findall(r"(\w+)=~?\"", expression))
    grouped = {
        name
        for each in re.findall(r"\b(?:by|on) \((.*?)\)", expression)
        for name in each.split(", ")
    }
    assert matched | grouped <= labels | ADDED


def test_a_sentence_names_labels_that_its_metrics_have() -> None:
    for rule in RULES:
        metrics = METRIC.findall(rule["expr"])
        labels = set().union(*(known()[metric] for metric in metrics)) | ADDED
        said = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", said)) <= labels, rule["alert"]
        assert rule["annotations"]["summary"].endswith((".", "}."))
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_every_alert_has_a_test_and_a_line_on_the_page() -> None:
    names = [rule["alert"] for rule in RULES]
    tests = yaml.safe_load((FOLDER / "alerts-test.yml").read_text())["tests"]
    expected = [
        (each["alertname"], bool(each.get("exp_alerts")))
        for t in tests
        for each in t["alert_rule_test"]
    ]
    for name in names:
        # It fires in one, and not in another.
        if name != "VflCertificateEnds":
            assert {fires for alert, fires in expected if alert == name} == {True, False}, name
    assert {alert for alert, _ in expected} == set(names)
    assert re.findall(r"^\| `(Vfl\w+)` \|", PAGE.read_text(), re.MULTILINE) == names


def test_a_waiting_run_is_reported_before_a_deadline_ends_it() -> None:
    """After a deadline the run has failed, and its ports close. Prometheus needs a minute to read
    and to compute.
    """
    shortest_s = min(RunSettings().join_deadline_s, RunSettings().rejoin_deadline_s)
    waits = {rule["alert"]: rule["for"] for rule in RULES if 'state="waiting"' in rule["expr"]}
    assert set(waits) == {"VflRunWaits", "VflPartyMissing"}
    for alert, after in waits.items():
        assert 60 * int(after.removesuffix("m")) <= shortest_s - 60, alert


def test_the_tests_of_alerts_give_series_that_their_expressions_read() -> None:
    """Without promtool this finds a series whose name or labels no program has."""
    tests = yaml.safe_load((FOLDER / "alerts-test.yml").read_text())["tests"]
    for each in tests:
        series = [one["series"] for one in each["input_series"]]
        given = {METRIC.match(one).group() for one in series}  # type: ignore[union-attr]
        for name in given:
            labels = {
                label
                for one in series
                if one.startswith(f"{name}{{")
                for label in re.findall(r"(\w+)=\"", one)
            }
            assert labels <= known()[name] | ADDED, name
        for alert in {one["alertname"] for one in each["alert_rule_test"]}:
            (rule,) = [one for one in RULES if one["alert"] == alert]
            read = set(METRIC.findall(rule["expr"]))
            assert given & read, alert


def test_presence_expiry_version_queue_and_errors_of_serving_have_alert_and_panel() -> None:
    panels = " ".join(
        target["expr"] for each in DASHBOARD["panels"] for target in each.get("targets", [])
    )
    alerts = " ".join(rule["expr"] for rule in RULES)
    for name in (
        "vfl_serve_present",
        "vfl_certificate_not_after_timestamp_seconds",
        "vfl_party_info",
        "vfl_serve_waiting_requests",
        "vfl_serve_requests_total",
        "vfl_serve_ready",
    ):
        assert name in panels, name
        assert name in alerts, name


def test_the_panels_lie_beside_each_other() -> None:
    seen: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & seen, panel["title"]
        seen |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def promtool(*args: str, cwd: Path = FOLDER) -> None:
    if PROMTOOL is None:
        pytest.skip("promtool is not installed (Debian: apt install prometheus)")
    done = subprocess.run([PROMTOOL, *args], cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "words", ["check rules alerts.yml", "test rules alerts-test.yml", "check config prometheus.yml"]
)
def test_prometheus_takes_the_files(words: str) -> None:
    promtool(*words.split())


def test_prometheus_can_compute_the_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"x:{number}", "expr": each} for number, each in enumerate(ALL)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "x", "rules": rules}]}))
    promtool("check", "rules", "rules.yml", cwd=tmp_path)
