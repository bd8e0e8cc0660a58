"""Pages of metrics that real processes serve."""

import re

from diloco.runtime.metric_table import METRICS, Component


def missing(page: str, component: Component) -> set[str]:
    """Names of the component's metrics that a scraped page does not have."""
    served = set(re.findall(r"^# TYPE (\w+) ", page, re.M))
    return {metric.name for metric in METRICS if metric.component == component} - served
