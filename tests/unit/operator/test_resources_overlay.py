"""How a podTemplate overlays a pod."""

import pytest

from diloco_operator.resources.overlay import overlay, without_nulls


def test_objects_are_merged_key_by_key_at_any_depth():
    base = {"affinity": {"a": {"x": 1}, "b": 2}, "nodeSelector": {"zone": "a"}}
    over = {"affinity": {"a": {"y": 3}}, "nodeSelector": {"zone": "b"}}
    assert overlay(base, over) == {
        "affinity": {"a": {"x": 1, "y": 3}, "b": 2},
        "nodeSelector": {"zone": "b"},
    }


@pytest.mark.parametrize("field", ["containers", "initContainers"])
def test_containers_are_merged_by_name_and_new_ones_come_last(field):
    base = {field: [{"name": "main", "image": "a", "env": [{"name": "A", "value": "1"}]}]}
    over = {field: [{"name": "side"}, {"name": "main", "env": [{"name": "B", "value": "2"}]}]}
    assert overlay(base, over)[field] == [
        {
            "name": "main",
            "image": "a",
            "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
        },
        {"name": "side"},
    ]


@pytest.mark.parametrize(
    ("field", "first", "second"),
    [
        ("volumes", {"name": "v", "emptyDir": {}}, {"name": "v", "hostPath": {"path": "/"}}),
        ("env", {"name": "A", "value": "1"}, {"name": "A", "valueFrom": {}}),
        ("imagePullSecrets", {"name": "s"}, {"name": "s"}),
        ("volumeMounts", {"mountPath": "/a", "name": "v"}, {"mountPath": "/a", "name": "w"}),
        ("volumeDevices", {"devicePath": "/a", "name": "v"}, {"devicePath": "/a", "name": "w"}),
        ("ports", {"containerPort": 1, "name": "a"}, {"containerPort": 1, "protocol": "TCP"}),
    ],
)
def test_entries_with_a_single_source_are_replaced_whole(field, first, second):
    kept = {"name": "kept", "mountPath": "/k", "devicePath": "/k", "containerPort": 7}
    assert overlay({field: [first, kept]}, {field: [second]}) == {field: [second, kept]}


def test_a_port_number_of_two_protocols_is_two_ports():
    tcp, udp = {"containerPort": 1}, {"containerPort": 1, "protocol": "UDP"}
    assert overlay({"ports": [tcp]}, {"ports": [udp]}) == {"ports": [tcp, udp]}


def test_tolerations_are_added_up_once_each():
    a, b = {"key": "a"}, {"key": "b"}
    assert overlay({"tolerations": [a]}, {"tolerations": [b, a]}) == {"tolerations": [a, b]}


def test_other_lists_and_plain_values_are_replaced():
    base = {"hostAliases": [1, 2], "priority": 1}
    assert overlay(base, {"hostAliases": [3], "priority": 2}) == {"hostAliases": [3], "priority": 2}


def test_null_has_no_effect():
    assert without_nulls({"a": None, "b": [None, {"c": None, "d": 0}]}) == {"b": [{"d": 0}]}


def test_a_value_of_the_wrong_shape_stays_for_the_server_to_reject():
    ours, theirs = {"containers": [{"name": "main"}]}, {"containers": "x"}
    assert overlay(ours, theirs) == theirs
    assert overlay(theirs, ours) == theirs


def test_entries_without_a_name_stay_as_they_are():
    odd = [{"image": "x"}, {"name": {}}, 5, {"name": None}]
    assert overlay({"containers": [{"name": "main"}]}, {"containers": odd}) == {
        "containers": [{"name": "main"}, *odd]
    }


def test_the_layers_are_not_changed():
    base, over = {"a": {"b": [1]}}, {"a": {"c": 2}}
    overlay(base, over)
    assert (base, over) == ({"a": {"b": [1]}}, {"a": {"c": 2}})
