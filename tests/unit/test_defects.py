"""
Every reported defect has a test or a golden script with its number.

A name begins with the numbers of the defects: `test_06_snapshots_that_...`, `01_a08_a18_a_mute_member....txt`.
Defects of the operator have no numbers; OPERATOR has them by topic, with the tests for each.
"""

import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

DEFECTS = {
    "01": "one member that never answers stalls every round",
    "02": "one member that trickles freezes the job",
    "03": "a snapshot names one step and holds another",
    "04": "a report is merged into two fragments, K = 2",
    "04b": "a report is merged into two fragments, K = 1",
    "05": "an initialiser that hangs keeps the job from beginning",
    "06": "with unreadable snapshots a new job begins over the old one",
    "07": "a learner that was cut off outweighs all others, and brings back what they merged",
    "08": "one missed result costs a whole fragment in fp32",
    "09": "a learner that joins during a merge never receives its result",
    "10": "a syncer that was paused drops all learners",
    "13": "a disk that hangs stops decisions and training",
    "14": "all learners lose the result of a slow round",
    "15": "a full disk at the end completes the job without a model",
    "16": "a stopped trainer fills the memory of its link",
    "17": "loading a checkpoint takes several times its size",
    "18": "a replay is not bitwise equal on another CPU",
    "19": "two rounds of one fragment are in flight",
    "20": "a far learner is never merged",
    "21": "a runner that is late at the end never completes the job",
    "24": "with a quorum of all, one NaN stops the job without a reason",
    "26": "the progress of one member excuses all others",
    "27": "events.jsonl grows without a bound",
    "28": "a model of DTensors dies in an error of torch",
    "29": "an exception in a decision freezes the job",
    "a01": "a member that states 2^63 tokens owns the merge",
    "a02": "a norm below the floor is scaled up without a bound",
    "a03": "huge finite deltas are merged",
    "a05": "impossible numbers of a Report reach status and snapshots",
    "a06": "a negative or NaN duration turns off the grace window of all",
    "a07": "members that do not exist fill the quorum, and claimed steps set the pace",
    "a08": "a mute, dripping or NaN member stops the others",
    "a09": "streams without a message use up all threads",
    "a10": "memory and log lines for an untrusted peer: gzip, constants, shapes, names, a petabyte",
    "a11": "idle connections use up all descriptors",
    "a12": "identity: another job's certificate, unissued incarnations, unknown indexes",
    "a13": "a syncer's answer uses up the memory of the operator",
    "a16": "members are never forgotten",
    "a18": "a mute member leaves no trace",
    "b01": "who may create jobs may run any pod",
    "b02": "open modes, and links that are written through",
    "b03": "control characters reach log and terminal",
    "b05": "an evaluation with a huge number ends the report",
    "b06": "the endpoint of a job scans addresses for its author",
    "b07": "silent syncers of one tenant delay the jobs of another",
}
"""Number → defect."""

OPEN: dict[str, str] = {}
"""Not fixed, or fixed without a test: what is missing."""

OPERATOR = {
    "roll": {
        "a routine image change counts as faults of learners of several pods and fails the job": (
            "unit/agent/test_unit.py::test_pods_replaced_in_any_order_and_at_any_pace_never_count",
            "e2e/test_learners_of_pods.py::test_a_changed_template_replaces_one_whole_learner_after_the_other",
        ),
    },
    "faults": {
        "a rank that is preempted again and again fails the learner by the exits of its peers": (
            "unit/agent/test_unit.py::test_a_peer_that_is_preempted_again_and_again_never_fails_the_learner",
            "e2e/test_learners_of_pods.py::test_a_preempted_pod_takes_its_learner_out_until_there_is_room_again",
        ),
    },
    "orphan": {
        "the claim of the former job is made smaller when it is adopted": (
            "unit/operator/test_volume_claims.py"
            "::test_a_claim_that_is_adopted_is_never_made_smaller_and_keeps_its_class_and_modes",
        ),
        "a reverted image does not heal the job": (
            "unit/operator/test_decide_failed_learners.py::test_a_reverted_image_heals_without_a_new_job",
            "e2e/test_lifecycle.py::test_a_reverted_image_heals_the_job",
        ),
        "an upgrade of the operator with other templates rolls running jobs": (
            "unit/operator/test_running_templates.py"
            "::test_a_version_with_another_template_applies_nothing_to_a_running_job",
            "e2e/test_drills.py::test_operators_that_are_upgraded_twice_and_rolled_back_restart_no_pod",
        ),
        "a ServiceAccount of the job's own name is NameTaken": (
            "unit/operator/test_objections.py::test_a_job_with_a_service_account_of_its_own_name_uses_it",
        ),
    },
    "world1": {
        "a field of a newer CRD makes a running job InvalidSpec": (
            "unit/operator/test_stored_job.py"
            "::test_an_older_operator_keeps_a_job_of_a_newer_crd_running_and_names_what_it_ignores",
        ),
        "a StatefulSet whose pods are refused shows nothing": (
            "unit/operator/test_pending_events.py"
            "::test_a_statefulset_that_gets_no_pods_reports_the_api_servers_message",
            "unit/operator/test_pending_events.py"
            "::test_a_deployment_that_gets_no_pod_reports_the_api_servers_message",
            "e2e/test_lifecycle.py::test_pods_that_the_api_server_refuses_are_reported_with_its_message",
        ),
        "a lost claim is replaced by an empty one, and the job starts over": (
            "unit/operator/test_lost_volume.py"
            "::test_a_lost_claim_is_not_replaced_by_an_empty_one_and_the_syncer_waits",
            "e2e/test_volumes.py::test_a_lost_claim_holds_the_job_until_a_person_gives_it_up",
        ),
        "a failed job leaves no log": (
            "unit/operator/test_kept_pods.py::test_the_failed_pods_of_a_failed_job_stay_and_the_others_go",
            "unit/operator/test_decide_failed_jobs.py::test_the_end_of_the_log_is_in_the_condition",
            "e2e/test_failed_jobs.py"
            "::test_a_failed_job_is_understood_without_its_pods_and_resumed_after_correction",
        ),
        "a start that never ends stays Starting": (
            "unit/operator/test_pending_events.py"
            "::test_a_start_that_takes_longer_than_five_minutes_is_trouble",
            "unit/operator/test_pending_events.py"
            "::test_a_pod_that_the_kubelet_cannot_start_reports_the_kubelets_message",
        ),
    },
    "two": {
        "two installations overwrite each other's children": (
            "unit/operator/test_installations.py"
            "::test_the_second_installation_writes_one_event_that_names_the_first_and_nothing_else",
            "e2e/test_operator_replicas.py"
            "::test_a_second_installation_leaves_the_jobs_of_the_first_alone_and_names_it",
        ),
        "a region that fails is not shown in the others": (
            "unit/operator/test_region_failures.py"
            "::test_the_syncers_region_names_the_region_that_failed_and_its_reason",
        ),
    },
    "render_state": {
        "learners share the directory of a volume named state": (
            "unit/operator/test_learner_state.py"
            "::test_each_pod_has_a_directory_of_its_own_on_a_volume_named_state",
        ),
        "the controller replaces single pods of a learner": (
            "unit/operator/test_replacements.py"
            "::test_the_controller_replaces_no_pod_of_a_learner_of_several_by_itself",
        ),
        "the PodDisruptionBudget counts pods, not learners": (
            "unit/operator/test_resources.py"
            "::test_drains_may_take_the_pods_beyond_the_quorum_shared_out_by_size",
        ),
        "the end of a container's log is lost": (
            "unit/operator/test_resources.py"
            "::test_a_container_that_wrote_no_message_leaves_the_end_of_its_log",
        ),
    },
    "health_race": {
        "a job that is created during the list makes the watch look deaf": (
            "unit/operator/test_health.py"
            "::test_a_job_that_was_created_while_the_list_was_read_stays_delivered",
        ),
    },
    "ipv6": {
        "health, metrics and probes listen on IPv4 alone": (
            "unit/protos/test_listening.py::test_probes_health_and_metrics_answer_both_families",
            "integration/test_ipv6_only.py::test_a_job_its_metrics_and_its_ranks_need_no_ipv4",
        ),
    },
    "alert": {
        "a refused child counts as a successful reconcile": (
            "unit/operator/test_refused_requests.py"
            "::test_a_refused_child_is_reported_in_the_status_and_retried_with_back_off",
        ),
        "a job that failed masks the alert of the next one, and no alert names its job": (
            "unit/charts/test_alerts.py"
            "::test_the_alerts_fire_for_their_samples_and_for_nothing_else",
            "unit/charts/test_alerts.py"
            "::test_samples_are_of_metrics_that_exist_with_labels_that_they_have",
        ),
    },
}
"""Topic → defect → tests, as path below tests/ and function."""

NUMBER = re.compile(r"(?:\d\d|[ab]\d\d)b?(?=_)")


def numbers(name: str) -> set[str]:
    """The numbers at the beginning of a name."""
    found = set()
    while match := NUMBER.match(name):
        found.add(match[0])
        name = name[match.end() + 1 :]
    return found


@functools.cache
def covered() -> frozenset[str]:
    """Numbers of all tests and golden scripts."""
    names = [path.stem for path in (TESTS / "golden/scripts").rglob("*.txt")]
    for path in TESTS.rglob("test_*.py"):
        names += re.findall(r"^(?:async )?def test_(\w+)", path.read_text(), re.MULTILINE)
    return frozenset().union(*map(numbers, names))


@pytest.mark.parametrize("number", sorted(DEFECTS.keys() - OPEN.keys()))
def test_a_reported_defect_has_a_test_with_its_number(number):
    assert number in covered()


def test_what_is_open_has_no_test_yet():
    assert not covered() & OPEN.keys()


@pytest.mark.parametrize(
    "test",
    [
        pytest.param(test, id=f"{topic}: {test.partition('::')[2]}")
        for topic, defects in OPERATOR.items()
        for tests in defects.values()
        for test in tests
    ],
)
def test_a_defect_of_the_operator_has_the_tests_that_are_named_for_it(test):
    path, _, function = test.partition("::")
    assert re.search(rf"^def {function}\(", (TESTS / path).read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("06_snapshots_that_all_are_damaged", {"06"}),
        ("04b_a_report", {"04b"}),
        ("01_a08_a18_a_mute_member", {"01", "a08", "a18"}),
        ("a_member", set()),
        ("b02_a_link", {"b02"}),
    ],
)
def test_numbers_are_at_the_beginning_of_a_name(name, expected):
    assert numbers(name) == expected
