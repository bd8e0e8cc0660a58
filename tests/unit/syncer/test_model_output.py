"""The copy of the exported model at a URL."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from diloco.errors import StorageError
from diloco_syncer.storage.capture import ExportedModel
from diloco_syncer.storage.model import export_model
from diloco_syncer.storage.model_output import Output, is_copied
from diloco_syncer.storage.object_store import StoppedError
from diloco_testing.syncers.objects import MemoryObjects


def a_model(directory: Path, step: int = 1) -> ExportedModel:
    tensors = {"w": np.full(1000, step, np.float32)}
    sha256 = export_model(directory / "model", tensors, {"step": step})
    return ExportedModel(path=str(directory / "model/model.safetensors"), sha256=sha256, step=step)


def test_the_model_is_copied_and_its_description_last(tmp_path):
    objects, model = MemoryObjects(), a_model(tmp_path)
    output = Output(objects, tmp_path)
    assert not is_copied(tmp_path, model, output.url)
    output.write(model)
    assert json.loads(objects.content["model.json"])["sha256"] == model.sha256
    assert objects.content["model.safetensors"] == Path(model.path).read_bytes()
    assert is_copied(tmp_path, model, output.url)
    assert not is_copied(tmp_path, model, "s3://another/job")
    assert not is_copied(tmp_path, a_model(tmp_path, step=2), output.url)


@pytest.mark.parametrize("call", ["remove model.json", "put model.safetensors", "put model.json"])
def test_a_description_never_describes_another_model(tmp_path, call):
    objects = MemoryObjects()
    output = Output(objects, tmp_path)
    output.write(a_model(tmp_path))
    model = a_model(tmp_path, step=2)
    objects.fail(call)
    with pytest.raises(StorageError, match="503"):
        output.write(model)
    if "model.json" in objects.content:
        assert json.loads(objects.content["model.json"])["step"] == 1
        assert np.frombuffer(objects.content["model.safetensors"][-4:], np.float32) == 1
    assert not is_copied(tmp_path, model, output.url)
    output.write(model)
    assert is_copied(tmp_path, model, output.url)


def test_an_unexpected_error_is_a_reason_too(tmp_path):
    objects = MemoryObjects()
    objects.fail("put model.safetensors", error=RuntimeError("panic"))
    with pytest.raises(StorageError, match=r"s3://bucket/runs/job: RuntimeError: panic"):
        Output(objects, tmp_path).write(a_model(tmp_path))


def test_a_store_that_hangs_does_not_keep_the_process_from_ending(tmp_path):
    objects, hangs, release = MemoryObjects(), threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        release.wait(60)

    objects.before("put model.safetensors", hang)
    output = Output(objects, tmp_path)
    stopper = threading.Thread(target=lambda: (hangs.wait(60), output.stop()))
    stopper.start()
    with pytest.raises(StoppedError):
        output.write(a_model(tmp_path))
    release.set()
    stopper.join()
