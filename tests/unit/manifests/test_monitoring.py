"""Alerts and dashboard ask for metrics that exist, by labels that they have."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentfly.api import RolloutJobStatus, TrainingRunStatus
from agentfly.api.base import Condition
from agentfly.api.reasons import ConditionType
from agentfly.api.rolloutjob import RewardSummary, RolloutCounts
from agentfly.api.trainingrun import CheckpointStatus, Progress
from agentfly.broker.metrics import Metrics as BrokerMetrics
from agentfly.resources.events import Event, EventKind
from agentfly.resources.lease import PoolStatus
from agentfly_operator.cluster.metrics import Metrics as OperatorMetrics
from tests.unit.manifests.rendered import MANIFESTS, ROOT, objects

MONITORING = objects(MANIFESTS / "overlays/monitoring")
POOLS = objects(MANIFESTS / "overlays/monitoring/pools")
DASHBOARD = json.loads(MONITORING["ConfigMap", "agentfly-dashboard"]["data"]["agentfly.json"])
GUIDE = (ROOT / "docs/observability.md").read_text()
(GROUP,) = MONITORING["PrometheusRule", "agentfly"]["spec"]["groups"]
# Prometheus adds these to everything that it gets from a pod.
ADDED = {"namespace", "pod", "container", "job", "instance"}


WHEN = datetime(2026, 12, 1, tzinfo=UTC)
FAILED = Condition(type="Failed", status="True", reason="R", message="", last_transition_time=WHEN)
RUN = TrainingRunStatus(
    progress=Progress(step=1, total_steps=2, metrics={"reward": "0.5"}),
    checkpoint=CheckpointStatus(latest_step=1, path="/c", time=WHEN),
    step_time=WHEN,
    conditions=(FAILED,),
)
JOB = RolloutJobStatus(
    tasks=RolloutCounts(total=4, scored=1),
    reward=RewardSummary(mean="0.5", min="0", max="1"),
    conditions=(FAILED,),
)


def known() -> dict[str, set[str]]:
    """Every series that broker and operator can have, with its labels."""
    counts = dict.fromkeys(
        ("max", "min", "ready", "leased", "starting", "resetting", "stopping", "queued"), 1
    )
    counts |= dict.fromkeys(("starts", "resets", "failures"), 1)
    status = PoolStatus(kind="container", quarantined={}, reason="Idle", **counts)
    broker, operator = BrokerMetrics(lambda: {"p": status}), OperatorMetrics()
    for kind in EventKind:
        broker.note(Event(kind=kind, pool="p", reason="r", warm=True, seconds=1.0))
    operator.reconciles.labels("ResourcePool", "ok").inc()
    operator.reconcile_seconds.labels("ResourcePool").observe(1)
    operator.writes.labels("status").inc()
    operator.objects.labels("ResourcePool").set(1)
    operator.polls.labels("ok").inc()
    operator.runs.put(("n", "r"), RUN)
    operator.jobs.put(("n", "j"), JOB)
    found: dict[str, set[str]] = {}
    for text in (broker.text(), operator.text()):
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> Iterator[tuple[str, str]]:
    for rule in GROUP["rules"]:
        yield rule["alert"], rule["expr"]
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


KNOWN = known()


@pytest.mark.parametrize(("name", "expression"), list(expressions()), ids=lambda each: each[:30])
def test_every_metric_exists_and_has_the_labels(name, expression):
    series = re.findall(r"(agentfly_\w+)(?:\{([^}]*)\})?", expression)
    assert series, name
    together = set(ADDED)
    for metric, selector in series:
        assert metric in KNOWN, f"{name}: {metric}"
        assert set(re.findall(r"(\w+)\s*=", selector)) <= KNOWN[metric] | ADDED, f"{name}: {metric}"
        together |= KNOWN[metric]
    grouped = re.findall(r"\w+", " ".join(re.findall(r"(?:by|on) \(([^)]*)\)", expression)))
    assert set(grouped) <= together, name


def test_every_alert_says_what_to_do():
    for rule in GROUP["rules"]:
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "description"}
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            assert label in ADDED | {"pool", "kind", "name"}


def test_every_figure_of_runs_and_jobs_has_a_panel():
    shown = json.dumps(DASHBOARD["panels"])
    for metric in KNOWN:
        if metric.startswith(("agentfly_trainingrun_", "agentfly_rolloutjob_")):
            assert re.search(rf"\b{metric}\b", shown), metric


def test_the_tables_of_the_guide_have_what_there_is_and_nothing_else():
    rows = re.findall(r"^\| `(agentfly_\w+)` \| (\w+) \|", GUIDE, re.M)
    told = {f"{name}_bucket" if kind == "histogram" else name for name, kind in rows}
    assert told <= set(KNOWN)
    of_works = {name for name in KNOWN if name.startswith(("agentfly_trainingrun_", "agentfly_rolloutjob_"))}
    assert of_works <= told


def test_conditions_that_are_named_are_conditions():
    for name, expression in expressions():
        for kinds in re.findall(r'type=~?"([^"]*)"', expression):
            assert set(kinds.split("|")) <= set(ConditionType.__members__), name


def test_panels_have_a_title_an_explanation_and_a_place():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    for panel in DASHBOARD["panels"]:
        assert panel["title"]
        assert panel["description"]


def test_prometheus_is_led_to_operator_and_broker():
    monitor = MONITORING["ServiceMonitor", "agentfly-operator"]["spec"]
    service = MONITORING["Service", "agentfly-operator"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert monitor["endpoints"][0]["honorLabels"] is True  # else a run's namespace would be the operator's
    policy = POOLS["NetworkPolicy", "agentfly-broker-metrics"]["spec"]
    pods = POOLS["PodMonitor", "agentfly-broker"]["spec"]
    assert policy["podSelector"] == pods["selector"]
    assert policy["ingress"][0]["ports"] == [{"port": 7080}]
