"""What three steps of a program show: every fact that means trouble gives a finding, and no other does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from diloco.errors import DamagedError
from diloco_local.diagnosis import (
    SYNCER_BYTES,
    SYNCER_BYTES_PER_ELEMENT,
    Examination,
    Record,
    Step,
    Surroundings,
    diagnose,
)
from diloco_local.doctor import _later_step

MIB = 1 << 20
AROUND = Surroundings(
    learners=2, learner_checkpoints=2, snapshots=3, log_bytes=64 * MIB, free_bytes=1 << 40, memory_bytes=1 << 40,
    learner_limits={}, syncer_limit=None, ships_frozen=False,
)  # fmt: skip


def steps(number: int = 3, **changes: object) -> tuple[Step, ...]:
    """Healthy steps, which differ between learners by `learner`."""
    learner = changes.pop("learner", "a")
    return tuple(
        replace(
            Step(tokens=8, finite=True, optimizer_steps=1, rate=0.1, inputs=f"{learner}{n}", random=f"{learner}r{n}"),
            **changes,
        )
        for n in range(number)
    )  # fmt: skip


def record(**changes: object) -> Record:
    return replace(
        Record(
            begin=0, optimizers=1, model="m", elements=MIB, constant_bytes=0, frozen_tensors=0, frozen_bytes=0,
            frozen_digest="f", moving_buffers=0, changed_buffers="", not_stepped="", trained=True,
            checkpoint_bytes=12 * MIB, peak_bytes=400 * MIB, shared_bytes=0, reads_resumed=False,
            calls_after_done=0, steps=steps(),
        ),
        **changes,
    )  # fmt: skip


def start(learner: str = "eu/0", code: int | None = 0, **changes: object) -> Examination:
    own = {"cause": "", "seconds": 4.0, **changes}
    return Examination(**{"learner": learner, "record": record(), "code": code, **own})


def texts(*examinations: Examination, **around: object) -> list[str]:
    found = diagnose(examinations, replace(AROUND, **around))
    return [f"{'problem' if f.problem else 'note'} {','.join(f.learners)}: {f.text}" for f in found]


def test_a_healthy_program_has_no_finding():
    second = start("us/0", record=record(begin=100, steps=steps(learner="b", rate=0.05)))
    assert texts(start(), second) == []


# ------------------------------------------------------------ how it ended


@pytest.mark.parametrize(
    ("examination", "expected"),
    [
        (start(record=None), "did not call Learner.connect before it ended with exit code 0;"),
        (start(record=None, code=None), "did not call Learner.connect within 4.0 s;"),
        (start(record=None, code=1, cause="No module named 'x'"),
         "ended with exit code 1 before it connected (No module named 'x'); fix this first"),
        (start(record=None, code=-9), "ended with signal 9 (SIGKILL) before it connected;"),
        (start(record=record(steps=()), code=None), "did not call learner.step() within 4.0 s;"),
        (start(record=record(steps=steps(2)), code=None), "made 2 of 3 steps within 4.0 s; raise --seconds"),
        (start(record=record(steps=steps(2))),
         "ended with exit code 0 after 2 of 3 steps, while learner.done was false; its loop must be"),
        (start(record=record(steps=steps(1)), code=1, cause="boom"), "ended with exit code 1 after 1 of 3 steps (b"),
        (start(record=record(calls_after_done=4)), "called again although learner.done was true, at least 4 times"),
        (start(code=None, ending_seconds=30.0), "did not end within 30.0 s after learner.done was true"),
        (start(code=1, cause="boom"), "after its last step, the program ended with exit code 1 (boom)"),
    ],
)  # fmt: skip
def test_a_program_that_does_not_end_as_a_learner_is_a_problem(examination, expected):
    (text,) = texts(examination)
    assert text.startswith("problem eu/0: ")
    assert expected in text


# ------------------------------------------------------------ its steps


def test_steps_without_tokens_and_losses_that_are_not_finite_are_named():
    first, second, third = steps()
    mixed = (first, replace(second, tokens=0), replace(third, finite=False))
    found = texts(start(record=record(steps=mixed)))
    assert ["tokens=0 in step 2" in found[0], "NaN or Inf in step 3" in found[1]] == [True, True]
    assert len(found) == 2


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((1, 0, 1), "problem eu/0: no optimizer step preceded learner.step() in step 2;"),
        ((0, 1, 0), "problem eu/0: no optimizer step preceded learner.step() in step 3;"),
        ((0, 0, 1), "note eu/0: no optimizer step preceded learner.step() in steps 1, 2;"),
        ((4, 4, 4), "note eu/0: 4 optimizer steps preceded each learner.step();"),
        ((1, 4, 4), None),
        ((0, 0, 0), None),
        ((1, 1, 1), None),
    ],
)
def test_calls_without_an_optimizer_step_are_counted(counts, expected):
    own = tuple(replace(s, optimizer_steps=n) for s, n in zip(steps(), counts, strict=True))
    found = texts(start(record=record(steps=own)))
    if expected is None:
        assert found == []
    else:
        assert found[0].startswith(expected)


def test_two_optimizers_with_one_step_each_are_as_expected():
    assert texts(start(record=record(optimizers=2, steps=steps(optimizer_steps=2)))) == []


def test_steps_that_a_loss_scaler_may_have_skipped_are_no_problem():
    (text,) = texts(start(record=record(trained=False, steps=steps(optimizer_steps=0))))
    assert text.startswith("note eu/0: no optimizer step preceded learner.step(), and no parameter")
    assert "GradScaler" in text


def test_a_model_that_does_not_change_and_a_batch_that_repeats_are_seen():
    found = texts(start(record=record(trained=False, steps=steps(inputs="same"))))
    assert "no parameter changed in 3 steps" in found[0]
    assert "note eu/0: the model got the same batch in all 3 steps" in found[1]


# ------------------------------------------------------------ its model


def test_buffers_and_parameters_without_an_optimizer_and_frozen_ones_are_reported():
    own = record(
        moving_buffers=4, changed_buffers="buffer usage changed", not_stepped="head.weight is in no optimizer",
        frozen_tensors=3, frozen_bytes=5 * MIB,
    )  # fmt: skip
    found = texts(start(record=own))
    assert [text.partition(":")[0] for text in found] == ["problem eu/0"] + ["note eu/0"] * 3
    assert "head.weight is in no optimizer" in found[0]
    assert "buffer usage changed" in found[1]
    assert "4 buffers change while training" in found[2]
    assert "5.00 MiB of frozen parameters are not sent" in found[3]
    assert "each learner downloads them" in texts(start(record=own), ships_frozen=True)[3]


def test_what_both_learners_show_is_one_finding():
    (text,) = texts(
        start(record=record(not_stepped="w is in none")),
        start("us/0", record=record(begin=9, not_stepped="w is in none", steps=steps(learner="b"))),
    )
    assert text.startswith("problem eu/0,us/0: ")


def test_memory_is_compared_with_the_limit_of_the_learner():
    limits = {"learner_limits": {"eu/0": 400 * MIB}}
    (text,) = texts(start(), **limits)
    assert "needed 400 MiB, and copies for the exchange of fragments add 8.00 MiB" in text
    assert "resources.limits.memory is 400 MiB: raise it to at least 510 MiB" in text
    (text,) = texts(start(), learner_limits={"eu/0": 450 * MIB})
    assert text.startswith("note eu/0: ")
    assert texts(start(), learner_limits={"eu/0": 600 * MIB, "us/0": 1}) == []


# ------------------------------------------------------------ two learners


def pair(first: dict[str, object], second: dict[str, object]) -> list[str]:
    a = record(**{"steps": steps(**first.pop("steps", {})), **first})
    b = record(**{"begin": 100, "steps": steps(**{"learner": "b", **second.pop("steps", {})}), **second})  # fmt: skip
    return texts(start(record=a), start("us/0", record=b))


def test_equal_batches_and_equal_random_numbers_of_two_learners_are_problems():
    found = pair({}, {"steps": {"learner": "a"}})
    assert "eu/0,us/0: both got the same batches in all 3 steps" in found[0]
    assert "eu/0,us/0: both models drew the same random numbers" in found[1]
    assert len(found) == 2


def test_what_could_not_be_compared_is_not_reported():
    unknown = {"inputs": "", "random": ""}
    assert pair({"steps": unknown}, {"steps": unknown}) == []


def test_other_models_and_other_frozen_parameters_are_problems():
    found = pair({}, {"model": "n", "frozen_digest": "g"})
    assert "their models differ in names" in found[0]
    assert "their frozen parameters differ" in found[1]


def rates(*values: float, learner: str) -> tuple[Step, ...]:
    return tuple(replace(s, rate=r) for s, r in zip(steps(learner=learner), values, strict=True))


@pytest.mark.parametrize(("later", "expected"), [((0.1, 0.2, 0.3), True), ((0.3, 0.2, 0.1), False)])
def test_a_schedule_that_ignores_the_global_step_is_seen_by_its_rates(later, expected):
    assert pair({}, {}) == []  # constant rates: nothing can be seen
    first = record(steps=rates(0.1, 0.2, 0.3, learner="a"))
    second = record(begin=100, steps=rates(*later, learner="b"))
    found = texts(start(record=first), start("us/0", record=second))
    assert bool(found) is expected
    if expected:
        assert "was 0.1, 0.2, 0.3 from global step 0 on, and the same from step 100" in found[0]


def test_a_warm_up_after_a_start_without_state_is_no_problem():
    first = record(steps=rates(0.1, 0.2, 0.3, learner="a"), reads_resumed=True)
    second = record(begin=97, steps=rates(0.1, 0.2, 0.3, learner="b"), reads_resumed=True)
    (text,) = texts(start(record=first), start("us/0", record=second))
    assert text.startswith("note eu/0,us/0: the learning rate was 0.1, 0.2, 0.3")
    assert "a warm-up while learner.resumed is false is right" in text


@pytest.mark.parametrize("period", [2, 3, 5, 50, 100, 200, 250, 500])
@pytest.mark.parametrize("total", [1004, 2000, 10**6])
def test_the_second_start_is_at_no_multiple_of_a_period(period, total):
    assert _later_step(total) % period


# ------------------------------------------------------------ the machine


def test_disk_is_compared_with_all_that_a_run_writes():
    # 2 learners x (2 + 1) x 12 MiB, (3 + 1) x 8 MiB, 4 MiB and 64 MiB
    (text,) = texts(start(), free_bytes=171 * MIB)
    assert "up to 172 MiB: checkpoints of learners 72.0 MiB, snapshots 32.0 MiB, the m" in text
    assert text.startswith("problem : ")
    assert texts(start(), free_bytes=173 * MIB)[0].startswith("note : ")
    assert texts(start(), free_bytes=345 * MIB) == []


def test_the_memory_of_the_machine_and_of_the_syncer_must_suffice():
    syncer = SYNCER_BYTES_PER_ELEMENT * MIB + SYNCER_BYTES
    enough = 2 * 408 * MIB + syncer
    assert texts(start(), memory_bytes=enough) == texts(start(), memory_bytes=None) == []
    assert "2 learners with 408 MiB each" in texts(start(), memory_bytes=enough - 1)[0]
    once = record(shared_bytes=300 * MIB)  # of the libraries
    assert texts(start(record=once), memory_bytes=enough - 300 * MIB) == []
    (text,) = texts(start(record=once), memory_bytes=enough - 300 * MIB - 1)
    assert "2 learners with 108 MiB each, 300 MiB of files that they share" in text
    assert texts(start(), syncer_limit=syncer) == []
    assert "syncer.resources.limits.memory is" in texts(start(), syncer_limit=syncer - 1)[0]


# ------------------------------------------------------------ the record


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"begin": "x"}', "{" * 100_000, "\0"])
def test_a_damaged_record_is_refused(text):
    with pytest.raises(DamagedError, match="cannot be read"):
        Record.from_json(text)


def test_a_record_has_no_more_than_three_steps_and_short_texts():
    step = {"tokens": 1, "finite": True, "optimizerSteps": 1, "rate": None, "inputs": "", "random": ""}  # fmt: skip
    data = {
        "begin": 0, "optimizers": 1, "model": "m", "elements": 1, "constantBytes": 0, "movingBuffers": 0,
        "frozen": {"tensors": 0, "bytes": 0, "digest": ""}, "notStepped": "w" * 999, "peakBytes": 0,
        "callsAfterDone": 0, "steps": [step] * 9, "changedBuffers": "b" * 9999,
    }  # fmt: skip
    found = Record.from_json(json.dumps(data))
    assert (len(found.steps), len(found.not_stepped), len(found.changed_buffers)) == (3, 600, 600)
