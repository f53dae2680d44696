"""The declaration follows Prometheus' rules, and the page, the dashboard and the alerts follow the declaration."""

import json
import re
from pathlib import Path

import pytest
import yaml
from tests.worker.metrics.metrics_page import PAGE, page_with_table

from stoker_worker.metrics.declared import DECLARED

DOCKER = Path(__file__).resolve().parents[3] / "docker"
DASHBOARD, ALERTS = DOCKER / "grafana" / "stoker.json", DOCKER / "alerts.yaml"
NAMES = {metric.name: metric for metric in DECLARED}


def dashboard_expressions():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def alert_expressions():
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def test_names_are_those_of_prometheus_rules():
    assert len(NAMES) == len(DECLARED)
    for name, metric in NAMES.items():
        assert re.fullmatch(r"(stoker|process)(_[a-z0-9]+)+", name), name
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert not name.endswith(("_count", "_sum", "_bucket")), name
        assert metric.help.endswith("."), name
        assert (metric.kind == "histogram") == bool(metric.buckets), name
        assert list(metric.buckets) == sorted(set(metric.buckets)), name
        assert not metric.values or len(metric.labels) == 1, name


def test_the_page_has_the_table_of_the_declaration():
    assert PAGE.read_text() == page_with_table(), "python -m tests.worker.metrics.metrics_page"


@pytest.mark.parametrize("expression", [*dashboard_expressions(), *alert_expressions()])
def test_expressions_use_declared_metrics_with_their_labels(expression):
    used = re.findall(r"((?:stoker|process)_\w+)(?:\{(.*?)\})?", expression)
    assert used
    for name, matchers in used:
        metric = NAMES.get(name) or NAMES[re.sub(r"_(bucket|count|sum)$", "", name)]
        assert (name == metric.name) == (metric.kind != "histogram"), name
        for label, value in re.findall(r"(\w+)[=!]~?\"(.*?)\"", matchers):
            assert label in (*metric.labels, "instance"), expression
            if label in metric.labels and metric.values:
                assert set(value.split("|")) <= set(metric.values), expression


def test_the_dashboard_and_the_alerts_are_whole():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] and panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["summary"], rule["alert"]
            assert rule["labels"]["severity"] in {"page", "warn", "info"}, rule["alert"]
