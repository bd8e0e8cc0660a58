"""Whether a live object has drifted."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_operator.decide.drift import covers, has_drifted, same_quantity


def child(kind="StatefulSet", applied="1", **spec):
    return {
        "kind": kind,
        "metadata": {"name": "a", "annotations": {"diloco.dev/applied": applied}},
        "spec": spec,
    }


def pod(**container):
    return {"containers": [{"name": "main", **container}]}


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(plain)
def test_everything_covers_itself(value):
    assert covers(value, copy.deepcopy(value))


@given(st.dictionaries(st.text(max_size=5), plain, max_size=4), st.text(min_size=6), plain)
def test_a_field_of_others_is_no_drift(wanted, name, value):
    assert covers({**wanted, name: value}, wanted)


@given(plain, plain, st.sampled_from(["", "env", "ports", "requests", "containers"]))
def test_any_two_values_can_be_compared(live, wanted, field):
    assert covers(live, wanted, field) in (True, False)


def test_another_hash_is_drift():
    assert has_drifted(child(applied="1"), child(applied="2"))


def test_a_lost_hash_is_drift():
    live = child()
    del live["metadata"]["annotations"]
    assert has_drifted(live, child())


def test_a_changed_field_is_drift():
    assert has_drifted(child(replicas=3), child(replicas=2))
    assert not has_drifted(child(replicas=2), child(replicas=2))


def test_a_lost_label_is_drift():
    wanted = child()
    wanted["metadata"]["labels"] = {"a": "b"}
    assert has_drifted(child(), wanted)


def test_a_claim_that_was_enlarged_is_left_alone():
    big, small = {"requests": {"storage": "20Gi"}}, {"requests": {"storage": "10Gi"}}
    claim = "PersistentVolumeClaim"
    assert not has_drifted(child(claim, resources=big), child(claim, resources=small))


@pytest.mark.parametrize(
    ("first", "second"),
    [("1000m", 1), ("0.5", "500m"), ("1024Mi", "1Gi"), (2, "2"), ("1e3", "1k"), ("odd", "odd")],
)
def test_quantities_are_compared_by_value(first, second):
    assert same_quantity(first, second)
    assert covers({"requests": {"cpu": first}}, {"requests": {"cpu": second}})


@pytest.mark.parametrize(
    ("first", "second"), [("1G", "1Gi"), ("1", "2"), (None, "1"), ("odd", "1"), ("", "1")]
)
def test_other_values_are_other_quantities(first, second):
    assert not same_quantity(first, second)
    assert not covers({"limits": {"cpu": first}}, {"limits": {"cpu": second}})


def test_the_servers_defaults_are_no_drift():
    assert covers(pod(image="x", terminationMessagePath="/dev/x"), pod(image="x"))


def test_entries_that_kubernetes_merges_by_name_may_stand_in_any_order_beside_others():
    live = {"env": [{"name": "OTHER", "value": "1"}, {"name": "B"}, {"name": "A", "value": "x"}]}
    assert covers(live, {"env": [{"name": "A", "value": "x"}, {"name": "B", "value": ""}]})
    assert not covers(live, {"env": [{"name": "A", "value": "y"}]})
    assert not covers(live, {"env": [{"name": "C", "value": "y"}]})


def test_ports_without_a_name_are_identified_by_number_and_protocol():
    live = {
        "ports": [{"containerPort": 1, "protocol": "UDP"}, {"containerPort": 1, "protocol": "TCP"}]
    }
    assert covers(live, {"ports": [{"containerPort": 1}]})
    assert not covers(live, {"ports": [{"containerPort": 2}]})


def test_one_volume_may_be_mounted_twice():
    mounts = [{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b"}]
    assert covers({"volumeMounts": mounts[::-1]}, {"volumeMounts": mounts})
    assert not covers({"volumeMounts": mounts[:1]}, {"volumeMounts": mounts})


def test_other_lists_are_compared_as_a_whole():
    assert not covers({"args": ["a", "b"]}, {"args": ["a"]})
    assert not covers({"args": ["b", "a"]}, {"args": ["a", "b"]})


def test_an_empty_value_that_the_server_omits_is_no_drift():
    assert covers({}, {"value": "", "list": [], "map": {}, "flag": False})
    assert not covers({}, {"flag": True})


def test_true_is_not_1():
    assert not covers({"a": 1}, {"a": True})
