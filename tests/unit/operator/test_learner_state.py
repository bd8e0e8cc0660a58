"""Where the state of learners is: on a volume of their own, or in a directory of a shared one."""

from pathlib import Path

import pytest

from diloco_operator.resources import Owner, Wanted, desired
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_testing.manifests.files import load_job

GOLDEN = Path(__file__).parents[3] / "tests/golden"
EVERYTHING, SHARED = GOLDEN / "everything.yaml", GOLDEN / "manifests/shared-state.job.yaml"
SCOPE = OperatorScope(worker_image="w:1", syncer_image="s:1")
OWNER = Owner(namespace="ml", uid="1")
CLAIM = "{name: state, persistentVolumeClaim: {claimName: all}}"


def workload(name, source=EVERYTHING, sets=(), **wanted):
    made = desired(load_job(source, sets), OWNER, SCOPE, Wanted(**wanted))
    kinds = ("StatefulSet", "Deployment")
    (found,) = [c for c in made if c["kind"] in kinds and c["metadata"]["name"] == name]
    return found


def state_mount(made):
    main = made["spec"]["template"]["spec"]["containers"][0]
    (mount,) = [each for each in main["volumeMounts"] if each["mountPath"] == "/var/lib/diloco"]
    return mount


def state_volumes(made):
    volumes = made["spec"]["template"]["spec"]["volumes"]
    return [volume for volume in volumes if volume["name"] == "state"]


def with_volumes(*volumes, place="spec.learner"):
    return [f"{place}.podTemplate={{spec: {{volumes: [{', '.join(volumes)}]}}}}"]


# ------------------------------------------------------------------ a volume that pods share


def test_each_pod_has_a_directory_of_its_own_on_a_volume_named_state():
    mount = state_mount(workload("stdlib-gpt-eu", sets=with_volumes(CLAIM)))
    assert mount == {
        "name": "state", "mountPath": "/var/lib/diloco", "subPathExpr": "$(DILOCO_POD)",
    }  # fmt: skip
    # Kubernetes expands variables of the container, and this one is the name of the pod.
    main = workload("stdlib-gpt-eu", sets=with_volumes(CLAIM))["spec"]["template"]["spec"]
    (pod,) = [e for e in main["containers"][0]["env"] if e["name"] == "DILOCO_POD"]
    assert pod["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"


def test_a_mount_of_the_users_own_does_not_bring_the_learners_together_again():
    mine = "{name: main, volumeMounts: [{name: state, mountPath: /var/lib/diloco, subPath: x}]}"
    sets = [f"spec.learner.podTemplate={{spec: {{volumes: [{CLAIM}], containers: [{mine}]}}}}"]
    assert state_mount(workload("stdlib-gpt-eu", sets=sets))["subPathExpr"] == "$(DILOCO_POD)"
    assert "subPath" not in state_mount(workload("stdlib-gpt-eu", sets=sets))


def test_a_region_may_have_a_shared_volume_alone():
    sets = with_volumes(CLAIM, place="spec.regions[us]")
    assert "subPathExpr" in state_mount(workload("stdlib-gpt-us", sets=sets))
    assert "subPathExpr" not in state_mount(workload("stdlib-gpt-eu", sets=sets))


def test_the_evaluator_has_one_directory_for_all_of_its_pods_beside_the_learners():
    evaluator = workload("stdlib-gpt-evaluator", sets=with_volumes(CLAIM))
    assert state_mount(evaluator)["subPathExpr"] == "stdlib-gpt-evaluator"


@pytest.mark.parametrize(
    "volume", ["{name: state, emptyDir: {sizeLimit: 5Gi}}", "{name: state, ephemeral: {}}"]
)
def test_a_volume_that_each_pod_has_for_itself_is_mounted_whole(volume):
    mount = state_mount(workload("stdlib-gpt-eu", sets=with_volumes(volume)))
    assert mount == {"name": "state", "mountPath": "/var/lib/diloco"}


def test_without_a_volume_of_the_users_own_the_template_is_as_before():
    made = workload("stdlib-gpt-eu")
    assert state_mount(made) == {"name": "state", "mountPath": "/var/lib/diloco"}
    assert state_volumes(made) == [{"name": "state", "emptyDir": {}}]


@pytest.mark.parametrize("volumes", ["[state]", "[[]]", "state", "{name: state}", "[{name: 1}]"])
def test_volumes_of_any_shape_are_left_for_the_server_to_reject(volumes):
    sets = [f"spec.learner.podTemplate={{spec: {{volumes: {volumes}}}}}"]
    assert state_mount(workload("stdlib-gpt-eu", sets=sets))["name"] == "state"
    stored = workload("stdlib-gpt-eu", sets=[*sets, "spec.learner.storage={}"])
    assert stored["spec"]["volumeClaimTemplates"]


# ------------------------------------------------------------------------ learner.storage


def test_learner_storage_gives_each_pod_a_claim():
    made = workload("stdlib-gpt-eu", sets=["spec.learner.storage={size: 3Gi}"])
    assert made["spec"]["volumeClaimTemplates"] == [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "state"},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "3Gi"}},
            },
        }
    ]
    assert state_mount(made) == {"name": "state", "mountPath": "/var/lib/diloco"}
    assert state_volumes(made) == []


def test_learner_storage_replaces_a_volume_named_state():
    made = workload("stdlib-gpt-eu", sets=["spec.learner.storage={}", *with_volumes(CLAIM)])
    assert state_volumes(made) == []
    assert "subPathExpr" not in state_mount(made)


def test_the_evaluator_gets_no_claim():
    made = workload("stdlib-gpt-evaluator", sets=["spec.learner.storage={}"])
    assert state_volumes(made) == [{"name": "state", "emptyDir": {}}]


def retention(sets, **wanted):
    return workload("stdlib-gpt-eu", sets=sets, **wanted)["spec"][
        "persistentVolumeClaimRetentionPolicy"
    ]


def test_the_volumes_of_learners_go_with_the_job_and_outlive_scaling_unless_configured_otherwise():
    assert retention(["spec.learner.storage={}"]) == {
        "whenDeleted": "Delete", "whenScaled": "Retain",
    }  # fmt: skip
    other = ["spec.learner.storage={whenDeleted: Retain, whenScaled: Delete}"]
    assert retention(other) == {"whenDeleted": "Retain", "whenScaled": "Delete"}


def test_a_suspension_deletes_no_volume_though_scaling_would():
    sets = ["spec.learner.storage={whenScaled: Delete}"]
    assert retention(sets, learners=False) == {"whenDeleted": "Delete", "whenScaled": "Retain"}


# ------------------------------------------------------------------------ the syncer's claim


def claim(sets=()):
    made = desired(load_job(EVERYTHING, sets), OWNER, SCOPE, Wanted())
    (found,) = [child for child in made if child["kind"] == "PersistentVolumeClaim"]
    return found


def test_a_retained_volume_has_no_owner():
    assert [o["uid"] for o in claim()["metadata"]["ownerReferences"]] == ["1"]
    kept = claim(["spec.syncer.storage.whenDeleted=Retain"])
    assert "ownerReferences" not in kept["metadata"]
    assert kept["spec"] == claim()["spec"]


def test_a_volume_without_an_owner_is_marked_so_that_argo_cd_keeps_it():
    """By its label app.kubernetes.io/instance it could belong to an application of the job's name."""
    key = "argocd.argoproj.io/sync-options"
    kept = claim(["spec.syncer.storage.whenDeleted=Retain"])["metadata"]
    assert kept["annotations"][key] == "Prune=false,Delete=false"
    assert kept["labels"]["app.kubernetes.io/instance"] == "stdlib-gpt"
    made = desired(load_job(EVERYTHING), OWNER, SCOPE, Wanted())
    assert not [each for each in made if key in each["metadata"]["annotations"]], "all are owned"
