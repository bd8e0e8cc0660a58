"""Snapshots and models in an object store: obstore against a real S3 server, a syncer process, a whole run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from diloco.spec import Checkpoint
from diloco_syncer.storage.object_store import (
    PART_BYTES,
    MissingError,
    Objects,
    ObjectsError,
    read_whole,
    stream,
)
from diloco_syncer.storage.obstore_objects import ObstoreObjects
from diloco_testing.learners.scripted import ScriptedLearner, good_round, thetas_of
from diloco_testing.local.run_process import LocalRun, manifest
from diloco_testing.network.s3_server import BUCKET, S3Server
from diloco_testing.syncers.process import RealSyncer, make_spec, until

URL = f"s3://{BUCKET}/runs"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with S3Server(tmp_path / "s3") as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        yield found


@pytest.fixture(params=["s3", "file"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    """The same promises of an S3 server and of a directory."""
    if request.param == "file":
        (tmp_path / "objects").mkdir()
        return ObstoreObjects(f"file://{tmp_path}/objects", "job")
    request.getfixturevalue("server")
    return ObstoreObjects(URL, "job", plain_http=True)


# ---------------------------------------------------------------- obstore


def test_an_object_is_read_back_in_ranges_listed_and_replaced(objects):
    assert objects.names("snapshots") == {}
    for content in (b"first", b"", b"second one"):
        objects.put("snapshots/a.json", [content], size_bytes=len(content))
        assert objects.names("snapshots") == {"snapshots/a.json": len(content)}
        assert read_whole(objects, "snapshots/a.json", len(content)) == content
    assert objects.read("snapshots/a.json", 3, 6) == b"ond"
    objects.put("snapshots-of-others/b", [b"b"], size_bytes=1)
    assert list(objects.names("snapshots")) == ["snapshots/a.json"]


def test_a_large_object_is_sent_and_read_in_parts(objects):
    data = os.urandom(2 * PART_BYTES + 12345)
    pieces = [data[at : at + 1_000_000] for at in range(0, len(data), 1_000_000)]
    objects.put("snapshots/a", iter(pieces), size_bytes=len(data))
    assert objects.names("snapshots") == {"snapshots/a": len(data)}
    assert b"".join(stream(objects, "snapshots/a", len(data))) == data


def test_an_object_whose_content_cannot_be_read_to_its_end_does_not_exist(objects):
    def interrupted() -> Iterator[bytes]:
        yield os.urandom(PART_BYTES)
        yield os.urandom(PART_BYTES)
        raise ObjectsError("the disk failed")

    with pytest.raises(ObjectsError, match="the disk failed"):
        objects.put("snapshots/a", interrupted(), size_bytes=3 * PART_BYTES)
    assert objects.names("snapshots") == {}


def test_only_one_of_several_writers_makes_a_new_object(objects):
    made: list[bool] = []
    threads = [
        threading.Thread(target=lambda n=n: made.append(objects.put_new("claims/1", b"%d" % n)))
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False] * 5 + [True]
    assert not objects.put_new("claims/1", b"x")


def test_an_object_that_is_missing_is_named_and_removing_it_is_no_error(objects):
    with pytest.raises(MissingError, match="job/claims/1: "):
        objects.read("claims/1", 0, 1)
    objects.put_new("claims/1", b"x")
    for _ in range(2):
        objects.remove("claims/1")
    assert objects.names("claims") == {}


def test_a_service_that_refuses_is_a_sentence_with_the_object_and_the_reply(server, monkeypatch):
    monkeypatch.setattr("diloco_syncer.storage.obstore_objects.RETRIES", 1)
    objects = ObstoreObjects(URL, "job", plain_http=True)
    server.unavailable = True
    with pytest.raises(ObjectsError) as refused:
        objects.put("snapshots/a", [b"x"], size_bytes=1)
    text = str(refused.value)
    assert text.startswith(f"{URL}/job/snapshots/a: ")
    assert "503 Service Unavailable" in text
    assert "\n" not in text
    assert len(text) < 400
    server.unavailable = False
    with pytest.raises(ObjectsError, match="404"):
        ObstoreObjects("s3://no-such-bucket", "job", plain_http=True).put_new("a", b"x")


def test_an_endpoint_without_tls_is_used_only_where_the_environment_names_it(server):
    with pytest.raises(ObjectsError, match=f"{URL}/job"):
        ObstoreObjects(URL, "job").names("snapshots")


def test_a_volume_that_is_not_mounted_is_a_store_that_cannot_be_reached_and_not_an_empty_one(
    tmp_path,
):
    objects = ObstoreObjects(f"file://{tmp_path}/volume/runs", "job")
    for _ in range(2):
        with pytest.raises(ObjectsError, match="volume/runs: is no directory"):
            objects.names("snapshots")
    assert not (tmp_path / "volume").exists()
    (tmp_path / "volume/runs").mkdir(parents=True)
    assert objects.names("snapshots") == {}


def test_an_environment_that_does_not_suffice_fails_at_each_use_and_does_not_end_the_process(
    monkeypatch, caplog
):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    objects = ObstoreObjects("az://container/runs", "job")
    assert "az://container/runs/job: " in caplog.text
    for _ in range(2):
        with pytest.raises(ObjectsError, match="Account must be specified"):
            objects.names("snapshots")


# ---------------------------------------------------------------- a syncer

MODEL_STEPS = 4


@pytest.mark.slow
def test_a_syncer_that_lost_its_directory_continues_from_the_store_and_its_model_arrives(
    server, tmp_path
):
    spec = make_spec(
        steps=MODEL_STEPS + 2, snapshot_url=URL, output_url=f"s3://{BUCKET}/models",
        syncer_checkpoint=Checkpoint(every_steps=2, keep=2),
    )  # fmt: skip
    with RealSyncer(tmp_path / "a", spec) as syncer, ScriptedLearner(syncer) as learner:
        learner.join().initialise(thetas_of(learner))
        learner.expect("ready")
        for step in range(1, MODEL_STEPS + 1):
            good_round(learner, seed=step)
        copied(syncer, MODEL_STEPS)
        fragments = range(len(learner.layout.fragments))
        thetas = [learner.theta(fragment) for fragment in fragments]
        status = syncer.status().copies
        assert (status.url, status.step, status.problem) == (f"{URL}/{spec.job}", MODEL_STEPS, "")
        syncer.kill()
    shutil.rmtree(tmp_path / "a")
    with RealSyncer(tmp_path / "b", spec) as syncer, ScriptedLearner(syncer) as learner:
        assert "restored the snapshot of step 4 from s3://" in syncer.output()
        assert (syncer.status().step, syncer.status().epoch) == (MODEL_STEPS, 2)
        learner.join()
        for fragment in fragments:
            np.testing.assert_array_equal(learner.theta(fragment), thetas[fragment])
        for step in (5, 6):
            good_round(learner, seed=step)
        until(lambda: syncer.status().state == "Complete", expected="the job is complete")
        assert syncer.terminate() == 0
    model = server.bucket / "models" / spec.job
    facts = json.loads((model / "model.json").read_text())
    data = (model / "model.safetensors").read_bytes()
    assert (facts["step"], facts["sha256"]) == (6, hashlib.sha256(data).hexdigest())
    assert data == (tmp_path / "b/run/model/model.safetensors").read_bytes()
    [claim] = server.objects(f"runs/{spec.job}/claims")
    assert claim == "000002.json"
    assert len(server.objects(f"runs/{spec.job}/snapshots")) == 4


def copied(syncer: RealSyncer, step: int) -> None:
    until(
        lambda: any(x["ok"] and x["step"] >= step for x in syncer.events("copy")),
        expected=f"a copy of step {step}",
    )


@pytest.mark.slow
def test_training_continues_while_the_store_does_not_answer_and_the_status_shows_it(
    server, tmp_path
):
    spec = make_spec(snapshot_url=URL, syncer_checkpoint=Checkpoint(every_steps=1, keep=2))
    with RealSyncer(tmp_path / "a", spec) as syncer, ScriptedLearner(syncer) as learner:
        learner.join().initialise(thetas_of(learner))
        learner.expect("ready")
        copied(syncer, 0)
        server.unavailable = True
        for step in range(1, 4):
            good_round(learner, seed=step)
        until(lambda: syncer.status().copies.problem, expected="a problem")
        assert "503" in syncer.status().copies.problem
        good_round(learner, seed=4)
        assert syncer.status().step == 4
        server.unavailable = False
        copied(syncer, 4)
        assert syncer.status().copies.problem == ""
        assert syncer.terminate() == 0


@pytest.mark.slow
def test_without_the_store_a_syncer_with_an_empty_directory_does_not_begin_again(server, tmp_path):
    syncer = RealSyncer(tmp_path / "a", make_spec(snapshot_url="s3://no-such-bucket/runs"))
    process = syncer.launch()
    try:
        until(lambda: "next attempt in" in syncer.output(), expected="an attempt", seconds=120)
        assert "s3://no-such-bucket/runs" in syncer.output()
        assert "404" in syncer.output()
        assert syncer.terminate() == 0
    finally:
        process.kill()
        process.wait(30)
    assert not list((syncer.dir / "snapshots").glob("*.safetensors"))


@pytest.mark.slow
def test_a_job_is_complete_only_when_its_model_is_at_its_url(server, tmp_path):
    spec = make_spec(steps=1, output_url=f"s3://{BUCKET}/models")
    with RealSyncer(tmp_path / "a", spec) as syncer, ScriptedLearner(syncer) as learner:
        learner.join().initialise(thetas_of(learner))
        learner.expect("ready")
        server.unavailable = True
        good_round(learner)
        until(lambda: "503" in syncer.status().waiting_for, expected="the reason", seconds=120)
        assert syncer.status().state == "Waiting"
        syncer.kill()  # its model is in the run directory
        server.unavailable = False
        syncer.start()
        until(lambda: syncer.status().state == "Complete", expected="the job is complete")
        assert server.objects(f"models/{spec.job}") == ["model.json", "model.safetensors"]
        puts = len(server.requests)
        syncer.kill()
        syncer.start()
        assert syncer.status().state == "Complete"
        assert len(server.requests) == puts  # a restart copies nothing again
    spec = replace(spec, output_url=f"s3://{BUCKET}/elsewhere")
    syncer.spec_file.write_text(spec.to_json())
    with syncer:
        until(lambda: syncer.status().state == "Complete", expected="the job is complete")
    assert server.objects(f"elsewhere/{spec.job}") == ["model.json", "model.safetensors"]


# ---------------------------------------------------------------- a whole run


@pytest.mark.slow
@pytest.mark.slow_tier
@pytest.mark.timeout(600)
def test_a_run_whose_directory_was_deleted_continues_from_the_bucket_and_its_model_arrives_there(
    server, tmp_path
):
    checkpoint = {"everySteps": 8, "keep": 2, "url": URL}
    job = manifest(
        "bucket", steps=32, learners=2, syncer={"checkpoint": checkpoint},
        output=f"s3://{BUCKET}/models", evaluation=None,
    )  # fmt: skip
    del job["spec"]["evaluation"]
    run = LocalRun(tmp_path, job)
    try:
        run.until(
            lambda: newest_step(server) >= 16, 300, expected="a snapshot of step 16 in the bucket"
        )
        run.process.send_signal(signal.SIGKILL)  # and with the supervisor, all of its processes
        run.process.wait(60)
        at = newest_step(server)
        shutil.rmtree(run.dir)
        run.start()
        assert run.wait(300) == 0, run.tail()
    finally:
        run.stop()
    log = (run.dir / "logs" / "syncer.log").read_text()
    assert f"restored the snapshot of step {at} from {URL}/bucket" in log
    starts = [line for line in lines(run.dir / "events.jsonl") if line["event"] == "start"]
    assert [line["step"] for line in starts] == [at]
    status = json.loads((run.dir / "status.json").read_text())
    assert (status["state"], status["sync"]["copies"]["problem"]) == ("Complete", "")
    assert status["sync"]["copies"]["url"] == f"{URL}/bucket"
    model = server.bucket / "models" / "bucket"
    assert json.loads((model / "model.json").read_text())["step"] == 32
    mine = load_file(run.dir / "model" / "model.safetensors")
    for name, array in load_file(model / "model.safetensors").items():
        np.testing.assert_array_equal(array, mine[name])


def newest_step(server: S3Server) -> int:
    names = server.objects("runs/bucket/snapshots")
    found = [name for name in names if name.endswith(".json")]
    return max((int(name.rpartition("-")[2].removesuffix(".json")) for name in found), default=-1)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
