"""Every alert of the chart has samples, of metrics that exist, and fires for them."""

import re
import shutil
from pathlib import Path

import yaml

from diloco.runtime.metric_table import METRICS
from diloco_testing.charts import run

ROOT = Path(__file__).parents[3]
RULES = ROOT / "charts/diloco/files/alerts.yaml"
SAMPLES = Path(__file__).with_name("alerts.yaml")


def samples():
    return yaml.safe_load(SAMPLES.read_text())["tests"]


def test_every_alert_has_samples_with_which_it_fires_and_some_with_which_it_does_not():
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    alerts = {rule["alert"] for rule in rules}
    expected = [found for test in samples() for found in test["alert_rule_test"]]
    assert {found["alertname"] for found in expected if found["exp_alerts"]} == alerts
    silent = {found["alertname"] for found in expected if not found["exp_alerts"]}
    assert silent == alerts


def test_the_alerts_fire_for_their_samples_and_for_nothing_else(tmp_path):
    shutil.copy(RULES, tmp_path / "rules.yaml")
    shutil.copy(SAMPLES, tmp_path / "samples.yaml")
    done = run("promtool", "test", "rules", str(tmp_path / "samples.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_samples_are_of_metrics_that_exist_with_labels_that_they_have():
    labels = {metric.name: set(metric.labels) for metric in METRICS}
    labels |= {f"{metric.name}_count": set(metric.labels) for metric in METRICS}
    added = {"namespace", "pod", "service", "diloco_dev_job"}
    """By Prometheus, from the pod."""
    for sample in (series for test in samples() for series in test["input_series"]):
        name, _, text = sample["series"].partition("{")
        found = set(re.findall(r"(\w+)=", text))
        if name != "up":
            assert labels[name] <= found <= labels[name] | added, sample
