import io
import json
import logging

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from diloco.runtime import logs, metric_table, metrics

PROMISED = """
syncer: diloco_global_step diloco_merges_total diloco_merge_members diloco_quorum_wait_seconds
  diloco_grace_seconds diloco_sync_seconds diloco_learners{region,state}
  diloco_learner_staleness_steps{learner} diloco_wire_bytes_total{direction,region}
  diloco_refused_total{reason} diloco_ejections_total{reason} diloco_recoveries_total{source}
  diloco_snapshot_seconds
  diloco_snapshot_copy_seconds diloco_snapshot_copy_step diloco_snapshot_copy_failures_total
  diloco_tokens_total{region}
learner: diloco_learner_steps_total diloco_learner_tokens_total diloco_learner_loss
  diloco_learner_step_seconds diloco_learner_sync_seconds_total diloco_learner_restarts_total
operator: diloco_operator_reconcile_seconds{result} diloco_operator_jobs{state}
  diloco_operator_job_state{job_namespace,job_name,state}
  diloco_operator_job_warning{job_namespace,job_name,condition,reason}
  diloco_operator_leader diloco_operator_queue_depth
  diloco_operator_queue_seconds diloco_operator_writes_total{kind}
"""


def test_the_table_holds_exactly_the_promised_metrics():
    def written(metric: metric_table.Metric) -> str:
        return metric.name + (f"{{{','.join(metric.labels)}}}" if metric.labels else "")

    components = {name: [] for name in ("syncer", "learner", "operator")}
    for metric in metric_table.METRICS:
        components[metric.component].append(written(metric))
    found = " ".join(f"{name}: {' '.join(items)}" for name, items in components.items())
    assert found.split() == PROMISED.split()


def test_counters_end_in_total_and_only_they():
    for metric in metric_table.METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert bool(metric.buckets) == (metric.kind == "histogram")


@pytest.mark.parametrize("component", ["syncer", "learner", "operator"])
def test_registered_metrics_are_exported_under_the_names_of_the_table(component):
    registry = CollectorRegistry()
    made = metrics.register(component, registry)
    for metric in metric_table.METRICS:
        assert (metric.name in made) == (metric.component == component)
    for name, metric in made.items():
        child = metric.labels(*["x"] * len(metric._labelnames)) if metric._labelnames else metric
        child.observe(1) if isinstance(metric, Histogram) else child.inc()
        assert f"# HELP {name} " in generate_latest(registry).decode()


@pytest.fixture
def root():
    logger = logging.getLogger()
    before, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = before
    logger.setLevel(level)


def logged(root: logging.Logger, *, json: bool) -> list[str]:
    stream = io.StringIO()
    logs.configure_logging(json=json, name="eu/0", stream=stream)
    log = logging.getLogger("diloco_test")
    log.info("merged %d", 3, extra={"step": 7, "seconds": 0.12345678, "region": "a b"})
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("it broke")
    log.debug("not shown")
    return stream.getvalue().splitlines()


def test_a_record_is_one_line_of_keys_and_values(root):
    first, second = logged(root, json=False)
    fields = first.split()
    assert fields[0].startswith("time=20")
    assert fields[0].endswith("+00:00")
    assert first.endswith(
        'level=info process=eu/0 logger=diloco_test message="merged 3" '
        'step=7 seconds=0.123457 region="a b"'
    )
    assert 'ValueError: two\\nlines"' in second


def test_a_record_is_one_json_object(root):
    first, second = (json.loads(line) for line in logged(root, json=True))
    del first["time"]
    assert first == {
        "level": "info",
        "process": "eu/0",
        "logger": "diloco_test",
        "message": "merged 3",
        "step": 7,
        "seconds": 0.12345678,
        "region": "a b",
    }
    assert second["trace"].endswith("ValueError: two\nlines")
