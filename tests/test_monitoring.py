# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard shows the metrics that there are: all of them, under their names and labels."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import monitoring

Labels = dict[str, set[str]]
#: What all our expressions are made of: labels, metric, matchers.
RATE = r"sum(?: by \(([^)]*)\))? \(rate\((vllm:\w+)\{([^}]*)\}\[\$__(?:rate_interval|range)\]\)\)"


@pytest.fixture(scope="module")
def dashboard(repository: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((repository / "monitoring" / "grafana.json").read_text())
    return found


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Labels:
    """Labels of every sample of our metrics, by the sample's name."""
    from prometheus_client.multiprocess import MultiProcessCollector

    from vllm_targetrows.engine.metrics import RoundMetrics

    folder = tmp_path_factory.mktemp("metrics")
    RoundMetrics({"model_name": "m", "engine": "0", "selection": "root"}, str(folder), row_rate=0, log_seconds=60)
    found: Labels = {}
    for metric in MultiProcessCollector.merge(map(str, folder.glob("*.db"))):
        for sample in metric.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_is_in_a_panel_under_its_name(dashboard: dict[str, Any], samples: Labels) -> None:
    used = {name for query in monitoring.queries(dashboard) for name in monitoring.metrics_in(query.expression)}
    assert used <= set(samples)
    assert {monitoring.family(name) for name in used} == {monitoring.family(name) for name in samples}


def test_labels_exist(dashboard: dict[str, Any], samples: Labels) -> None:
    for query in monitoring.queries(dashboard):
        grouped: set[str] = set()
        rates = re.findall(RATE, query.expression)
        assert len(rates) == query.expression.count("vllm:"), query.panel
        for by, name, matchers in rates:
            labels = set(filter(None, by.split(", ")))
            grouped |= labels
            labels |= set(re.findall(r"(\w+)(?:=|=~|!=)\"", matchers))
            assert labels <= samples[name], (query.panel, name)
            for variable in ("model_name", "engine", "selection"):
                assert f'{variable}=~"${variable}"' in matchers, query.panel
        assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= grouped, query.panel
    for metric, label in monitoring.variables(dashboard).values():
        assert label in samples[metric]


def test_the_dashboard_is_one_that_grafana_imports(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert dashboard["uid"] and dashboard["schemaVersion"] >= 38
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert [each["name"] for each in dashboard["templating"]["list"] if each["type"] == "datasource"] == ["datasource"]
    for panel in panels:
        if panel["type"] != "row":
            assert panel["description"]
            assert all(each["datasource"]["uid"] == "${datasource}" for each in (panel, *panel["targets"]))
    for one, other in combinations((panel["gridPos"] for panel in panels), 2):
        apart = [one[p] + one[s] <= other[p] or other[p] + other[s] <= one[p] for p, s in (("x", "w"), ("y", "h"))]
        assert any(apart), (one, other)


def test_the_check_finds_what_has_no_data() -> None:
    def problem(panel: str, values: dict[str, float | None]) -> str | None:
        return monitoring.Answer(monitoring.Query(panel, "", ""), values).problem()

    assert problem("Tree nodes", {"mean": 3.0}) is None
    assert problem("Tree nodes", {}) == "Tree nodes: no data"
    assert problem("Tree nodes", {"mean": 3.0, "median": None}) == "Tree nodes: NaN for median"
    assert problem("Distance to the next root row", {"address": None, "token_only": 0.5}) is None
