"""Two pools of one job in the same cluster, and the syncer in another (docs/adr/0022-pools.md)."""

from __future__ import annotations

from diloco_testing.clusters.kubectl import until
from diloco_testing.clusters.pair import Pair

PATIENCE_SECONDS = 240.0


def test_two_pools_share_a_cluster_and_a_failed_one_is_named_in_the_other_cluster(
    pair, fleet, tmp_path
):
    with fleet.namespace("pools", *pair.values()):
        made = Pair(pair, fleet.images, "pools", 30714, tmp_path, steps=10**6)
        spot = {"name": "spot", "cluster": "us", "learners": 1}
        for job in made.jobs.values():
            job.manifest["spec"]["regions"].append(spot)
        made.start()
        everyone = {"eu/0", "us/0", "spot/0"}
        until(
            lambda: made.members() == everyone, PATIENCE_SECONDS,
            expected="all pools train", details=made.details,
        )  # fmt: skip
        assert len(made.us.pods("learner")) == 2
        assert len(made.eu.pods("learner")) == 1

        def configure(config) -> None:
            for job in made.jobs.values():
                job.manifest["spec"]["regions"][1]["config"] = config
                job.apply()

        configure({"width": 32})  # another model: refused for good
        made.us.until_condition("LearnersReady", 120, status="False", reason="LearnersFailed")
        reported = made.eu.until_condition("QuorumMet", 90, reason="RegionFailed")
        print(reported["message"])
        assert (
            "region us failed: LearnerRefused: all its learners failed, us/0: "
            in reported["message"]
        )
        until(lambda: "RegionFailed" in dict(made.eu.events()), 30, expected="an Event reports it")
        step = made.eu.step()
        made.eu.until_step(step + 10, 60)
        assert made.members(since_step=step) == everyone - {"us/0"}
        configure({})
        made.eu.until_condition("QuorumMet", 150, reason="EnoughLearners")
        until(
            lambda: "us/0" in made.members(since_step=step), 60,
            expected="the region trains again", details=made.details,
        )  # fmt: skip
