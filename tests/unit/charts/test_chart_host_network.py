"""The chart with the operator in the network of its node."""

import json

from diloco_testing.charts import only, render, sets

POLICIES = sets(jobs__networkPolicy__enabled=True)
ON_NODE = sets(hostNetwork=True)


def strategy(*arguments):
    return only(render(*arguments), "Deployment")["spec"]["strategy"]


def test_an_upgrade_does_not_wait_for_ports_that_the_old_pod_holds():
    """Of one replica, Kubernetes would start the new pod first: on the same node it stays Pending."""
    assert strategy(*ON_NODE)["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert strategy() == {"type": "RollingUpdate"}


def policies(*arguments):
    container = only(render(*arguments), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    return json.loads(values["DILOCO_NETWORK_POLICIES"])


def test_the_policies_of_jobs_know_whether_a_selector_of_pods_matches_the_operator():
    assert policies(*POLICIES, *ON_NODE)["operatorOnHostNetwork"] is True
    assert policies(*POLICIES)["operatorOnHostNetwork"] is False
