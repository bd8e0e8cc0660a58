"""Which part of a job an operator runs."""

from dataclasses import replace
from pathlib import Path

from diloco_operator.resources.operator_scope import OperatorScope, listed_regions, tls_secret
from diloco_testing.manifests.files import load_job

EVERYTHING = Path(__file__).parents[3] / "tests/golden/everything.yaml"
ALL = OperatorScope(worker_image="w:1", syncer_image="s:1")
EU, US, ASIA = (replace(ALL, region=region) for region in ("eu", "us", "asia"))


def names(regions):
    return [region.name for region in regions]


def test_without_a_region_everything_is_its_own():
    job = load_job(EVERYTHING)
    assert names(ALL.own_regions(job)) == ["eu", "us"]
    assert ALL.has_syncer(job)
    assert ALL.manager == "diloco-operator"


def test_an_operator_with_a_region_runs_that_and_the_syncer_if_it_is_there():
    job = load_job(EVERYTHING)
    assert (names(EU.own_regions(job)), EU.has_syncer(job)) == (["eu"], True)
    assert (names(US.own_regions(job)), US.has_syncer(job)) == (["us"], False)
    assert (names(ASIA.own_regions(job)), ASIA.has_syncer(job)) == ([], False)
    assert US.manager == "diloco-operator-us"


def test_the_syncer_runs_in_the_first_region_unless_another_is_named():
    job = load_job(EVERYTHING, ['spec.syncer.region=""'])
    assert EU.has_syncer(job)
    job = load_job(EVERYTHING, ["spec.syncer.region=us"])
    assert (EU.has_syncer(job), US.has_syncer(job)) == (False, True)


def test_an_operator_with_a_region_runs_all_regions_of_its_cluster():
    pools = "{name: eu, learners: 1}, {name: us, cluster: eu, learners: 1}"
    job = load_job(EVERYTHING, [f"spec.regions=[{pools}, {{name: asia, learners: 1}}]"])
    assert names(EU.own_regions(job)) == ["eu", "us"]
    assert names(US.own_regions(job)) == []
    assert names(ASIA.own_regions(job)) == ["asia"]
    assert names(ALL.own_regions(job)) == ["eu", "us", "asia"]
    assert listed_regions(job) == "eu, us (cluster eu), asia"


def test_the_syncer_runs_in_the_cluster_of_its_region():
    job = load_job(EVERYTHING, ["spec.syncer.region=us", "spec.regions[us].cluster=asia"])
    assert [scope.has_syncer(job) for scope in (EU, US, ASIA, ALL)] == [False, False, True, True]


def test_learners_dial_the_service_where_the_syncer_is_and_the_endpoint_elsewhere():
    sets = ["spec.syncer.endpoint=eu.example.org:443", "spec.syncer.service.port=7171"]
    job = load_job(EVERYTHING, [*sets, "spec.tls={mode: Secret, secretName: certs}"])
    assert ALL.syncer_address(job, "ml") == "stdlib-gpt-syncer.ml.svc:7171"
    assert EU.syncer_address(job, "ml") == "stdlib-gpt-syncer.ml.svc:7171"
    assert US.syncer_address(job, "ml") == "eu.example.org:443"
    assert US.syncer_address(load_job(EVERYTHING), "ml") == ""


def test_the_secret_with_certificates_follows_the_mode():
    assert tls_secret(load_job(EVERYTHING)) == ""
    given = "spec.tls={mode: Secret, secretName: certs}"
    assert tls_secret(load_job(EVERYTHING, [given])) == "certs"
    made = "spec.tls={mode: CertManager, issuerRef: {name: ca}}"
    assert tls_secret(load_job(EVERYTHING, [made])) == "stdlib-gpt-tls"
