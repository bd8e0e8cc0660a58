"""What a peer sends of its local checkpoint, and what a newcomer makes of it: bytes, without a connection."""

from __future__ import annotations

import json

import pytest

from diloco.errors import StorageError
from diloco.model import tensorfile
from diloco.model.tensorfile import Entry
from diloco_worker.core.peer_files import received, select
from diloco_worker.core.sealed import SEAL, sealed, unsealed


def entry(name, lo, hi):
    return Entry(name=name, dtype="float32", shape=((hi - lo) // 4,), lo=lo, hi=hi)


ENTRIES = {
    each.name: each
    for each in (entry("model.w", 0, 400), entry("m2", 400, 440), entry("m1", 440, 600), entry("none", 600, 600))
}  # fmt: skip


def tensor(name):
    return {"tensor": name}


OPTIMIZERS = {
    "list": [
        {"dict": [[0, {"tuple": [tensor("m1"), tensor("m2")]}], ["x", tensor("m1")]]},
        {"dict": [[tensor("none"), 7]]},
    ]
}
"""A tensor twice, one as a key, one without elements."""


def checkpoint(**changes):
    return {
        "local_step": 7,
        "global_step": 11,
        "run": "r",
        "digest": "d",
        "optimizers": ["AdamW"],
        "facts": {"loss": 1.0},
        "bytes": 600,
        "sha256": "of the whole",
        "tree": {"dict": [["model", {"dict": [["w", tensor("model.w")]]}], ["optimizers", OPTIMIZERS]]},
        **changes,
    }  # fmt: skip


def test_the_tensors_of_the_optimizers_are_sent_once_each_and_in_the_order_of_the_file():
    selection = select(checkpoint(), ENTRIES)
    assert selection.ranges == [(400, 440), (440, 600)]
    assert selection.tensors_bytes == len(selection.header) + 200
    sent = tensorfile.parse(selection.header, selection.tensors_bytes)
    start = len(selection.header)
    assert {name: (e.lo - start, e.hi - start) for name, e in sent.items()} == {
        "m2": (0, 40),
        "m1": (40, 200),
        "none": (200, 200),
    }


def test_the_manifest_that_is_sent_has_nothing_of_the_model_or_the_data():
    manifest = unsealed(select(checkpoint(), ENTRIES).manifest)
    assert manifest == {
        "local_step": 7,
        "global_step": 11,
        "run": "r",
        "digest": "d",
        "optimizers": ["AdamW"],
        "facts": {},
        "tree": {"dict": [["optimizers", OPTIMIZERS]]},
    }


def test_a_checkpoint_that_does_not_describe_its_optimizers_is_not_sent():
    manifest = checkpoint()
    del manifest["optimizers"]
    for incomplete in (manifest, checkpoint(optimizers=None)):
        with pytest.raises(
            StorageError, match=r"^the checkpoint does not describe its optimizers$"
        ):
            select(incomplete, ENTRIES)


def accept(manifest, *, step=11, digest="d", run="r"):
    return received(
        manifest, sha256="of what was sent", tensors_bytes=345, digest=digest, run=run, step=step
    )


def test_what_arrived_becomes_a_checkpoint_with_the_size_and_digest_of_its_file():
    written = unsealed(accept(select(checkpoint(), ENTRIES).manifest))
    assert (written["sha256"], written["bytes"]) == ("of what was sent", 345)
    assert written["global_step"] == 11
    assert written["tree"] == {"dict": [["optimizers", OPTIMIZERS]]}


@pytest.mark.parametrize(
    ("asked", "changes", "error"),
    [
        ({"digest": "e"}, {}, "it is the state of another model"),
        ({"run": "s"}, {}, "it is the state of another run"),
        ({"step": 12}, {}, "it is of global step 11, expected 12 or later"),
        ({}, {"optimizers": None}, "it does not describe its optimizers"),
    ],
)
def test_a_state_of_something_else_is_refused_in_one_sentence(asked, changes, error):
    sent = unsealed(select(checkpoint(), ENTRIES).manifest)
    with pytest.raises(StorageError) as found:
        accept(sealed({**sent, **changes}), **asked)
    assert str(found.value) == error
    assert accept(sealed(sent), step=10)


def test_a_manifest_that_was_changed_is_refused_and_one_without_a_seal_is_not():
    text = sealed({"a": 1})
    assert unsealed(text) == {"a": 1}
    assert unsealed(b'{"a": 1}') == {"a": 1}
    assert len(json.loads(text)[SEAL]) == 64
    with pytest.raises(
        StorageError, match=r"^the manifest has SHA-256 [0-9a-f]{16}…, expected [0-9a-f]{16}…$"
    ):
        unsealed(text.replace(b"1", b"2", 1))
    with pytest.raises(StorageError, match=r"^the manifest is not a JSON object$"):
        unsealed(b"[1]")
