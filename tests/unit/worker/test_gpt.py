"""The built-in recipe: config, model, schedule, loop."""

import hashlib
import json
import math
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from diloco.errors import EXIT_REFUSED, ConfigError
from diloco_worker.recipes import config as config_reader
from diloco_worker.recipes import data, gpt, optim

TINY = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch": 4, "device": "cpu"}
CPU = torch.device("cpu")


def tiny(**changed):
    return config_reader.read(gpt.Config, TINY | changed)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"abcabcabc def ghi " * 400)
    return str(path)


def alone(*arguments, **env):
    return subprocess.run(
        [sys.executable, "-m", "diloco_worker.recipes.gpt", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={"OMP_NUM_THREADS": "1", **env},
        check=False,
    )


# ---------------------------------------------------------------- config


@pytest.mark.slow
def test_several_processes_per_learner_are_refused_before_reading_anything(tmp_path):
    job = {"DILOCO_JOB": "j", "DILOCO_LEARNER": "eu/0", "DILOCO_SYNCER": "127.0.0.1:1"}
    spec = {"DILOCO_SPEC": str(tmp_path / "none.json"), "RANK": "0", "WORLD_SIZE": "2"}
    done = alone(**job, **spec)
    assert (done.returncode, done.stdout) == (EXIT_REFUSED, "")
    assert done.stderr == (
        "WORLD_SIZE: 2, expected 1: the built-in recipe trains in one process; set "
        "spec.learner.podsPerLearner to 1, or your own program in spec.learner.command\n"
    )


def test_an_empty_config_is_the_examples():
    assert config_reader.read(gpt.Config, {}) == gpt.Config(layers=4, width=128, heads=4)


def test_keys_are_camel_case_and_fractions_may_be_quoted():
    read = tiny(learningRate="3e-4", weightDecay=0, warmupSteps=5, slowdown="2.5", momentum="0.9")
    assert (read.learning_rate, read.weight_decay, read.warmup_steps) == (3e-4, 0.0, 5)
    assert (read.slowdown, read.momentum) == (2.5, 0.9)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"layer": 2}, "config.layer: there is no such key; did you mean layers?"),
        ({"learning_rate": 1}, "config.learning_rate: .* did you mean learningRate?"),
        ({"zzz": 2}, "config.zzz: .* known keys: layers, width, .*, device"),
        ({"layers": "4"}, "config.layers: '4' is not a whole number"),
        ({"layers": True}, "config.layers: True is not a whole number"),
        ({"layers": None}, "config.layers: None is not a whole number"),
        ({"learningRate": "fast"}, "config.learningRate: 'fast' is not a number"),
        ({"learningRate": True}, "config.learningRate: True is not a number"),
        ({"data": 3}, "config.data: 3 is not a string"),
        ({"layers": 0}, "config.layers: 0 is not at least 1"),
        ({"threads": 0}, "config.threads: 0 is not at least 1"),
        ({"width": 20, "heads": 4}, "config.width: 20 is not a multiple of 8"),
        ({"learningRate": "0"}, "config.learningRate: 0.0 is not above 0"),
        ({"learningRate": "nan"}, "config.learningRate: nan is not above 0"),
        ({"weightDecay": -1}, "config.weightDecay: -1.0 is not 0 or more"),
        ({"momentum": 1}, "config.momentum: 1.0 is not at least 0 and less than 1"),
        ({"gradientClip": 0}, "config.gradientClip: 0.0 is not above 0"),
        ({"warmupSteps": -1}, "config.warmupSteps: -1 is not 0 or more"),
        ({"slowdown": "0.5"}, "config.slowdown: 0.5 is not at least 1"),
        ({"slowdown": "inf"}, "config.slowdown: inf is not at least 1"),
        ({"validationFraction": 1}, "config.validationFraction: 1.0 is not between 0 and 1"),
        ({"optimizer": "SGD"}, "config.optimizer: 'SGD' is not Muon or AdamW"),
        ({"dtype": "float16"}, "config.dtype: 'float16' is not float32 or bfloat16"),
        ({"device": "tpu"}, "config.device: 'tpu' is not auto, cpu or cuda"),
    ],
)
def test_a_wrong_config_is_refused_with_a_message(raw, message):
    with pytest.raises(ConfigError, match=message):
        config_reader.read(gpt.Config, raw)


def test_a_message_lists_all_problems_of_a_config():
    with pytest.raises(ConfigError) as caught:
        config_reader.read(gpt.Config, {"layers": 0, "batch": -1, "dtype": "x"})
    assert str(caught.value).count("\n") == 2


# ---------------------------------------------------------------- model


def digest(model):
    hashed = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        hashed.update(name.encode() + tensor.numpy().tobytes())
    return hashed.hexdigest()


PRINT_DIGEST = """
import hashlib
from diloco_worker.recipes import gpt
hashed = hashlib.sha256()
for name, tensor in sorted(gpt.GPT(gpt.Config(), seed=7).state_dict().items()):
    hashed.update(name.encode() + tensor.numpy().tobytes())
print(hashed.hexdigest())
"""


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_on_a_cpu_without_vector_instructions():
    other = subprocess.run(
        [sys.executable, "-c", PRINT_DIGEST],
        capture_output=True,
        text=True,
        timeout=280,
        env={"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "3"},
        check=True,
    )
    assert other.stdout.strip() == digest(gpt.GPT(gpt.Config(), seed=7))


def test_another_seed_gives_another_model():
    assert digest(gpt.GPT(tiny(), seed=7)) != digest(gpt.GPT(tiny(), seed=8))


def test_the_examples_model_has_at_least_as_many_tensors_as_fragments():
    model = gpt.GPT(gpt.Config(), seed=7)
    assert len(list(model.parameters())) >= 24
    assert sum(p.numel() for p in model.parameters()) == 851_968
    assert len(model.state_dict()) == len(list(model.parameters()))


def test_an_untrained_model_predicts_a_uniform_distribution():
    windows = np.random.default_rng(1).integers(0, 256, (8, 17))
    loss = gpt.loss_of(gpt.GPT(tiny(), seed=1), windows, tiny(), CPU).item()
    assert loss == pytest.approx(math.log(256), abs=0.05)


def trained(steps=30, **changed):
    """A tiny model after some steps; its weights are no longer those of the start."""
    config = tiny(**changed)
    model = gpt.GPT(config, seed=1)
    made = optim.build(
        model, model.hidden(), optimizer=config.optimizer, learning_rate=0.02, weight_decay=0.0
    )
    corpus = np.frombuffer(b"abcabcabc def ghi " * 50, np.uint8)
    losses = []
    for step in range(steps):
        windows = data.batch(
            corpus, seed=1, learner="a/0", step=step, batch=config.batch, context=config.context
        )
        loss = gpt.loss_of(model, windows, config, CPU)
        loss.backward()
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("optimizer", ["Muon", "AdamW"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_learns_a_simple_text_in_thirty_steps(optimizer, dtype):
    _, losses = trained(optimizer=optimizer, dtype=dtype)
    assert losses[-1] < 2.5 < 5 < losses[0]


def test_no_byte_sees_a_later_one():
    model, _ = trained()
    first = torch.arange(16)[None] + 97
    second = first.clone()
    second[0, 9] = 32
    with torch.no_grad():
        changed = (model(first) - model(second)).abs().amax(dim=(0, 2)) > 1e-6
    assert not changed[:9].any()
    assert changed[9:].all()


def test_the_order_of_earlier_bytes_matters():
    model, _ = trained()
    with torch.no_grad():
        first = model(torch.tensor([list(b"abcd")]))[0, -1]
        second = model(torch.tensor([list(b"bacd")]))[0, -1]
    assert not torch.allclose(first, second, atol=1e-4)


def test_attention_depends_on_the_distance_of_two_bytes_and_not_on_their_position():
    attention = gpt.GPT(tiny(context=16), seed=1).blocks[0].attention
    queries, keys = (torch.randn(1, 1, 1, 8).expand(1, 2, 16, 8) for _ in range(2))
    scores = (attention._rotate(queries) @ attention._rotate(keys).mT)[0, 0]
    assert torch.allclose(scores[1:, 1:], scores[:-1, :-1], atol=1e-5)
    assert not torch.allclose(scores[1:], scores[:-1], atol=1e-2)


# ---------------------------------------------------------------- schedule


def test_the_learning_rate_rises_over_the_warm_up_and_ends_at_zero():
    config = tiny(learningRate=1.0, warmupSteps=10)
    rates = [gpt.learning_rate(config, step=s, steps=100) for s in range(101)]
    assert rates[:10] == pytest.approx([(s + 1) / 11 for s in range(10)])
    assert rates[10] == 1.0
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == 0.0


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (10, 0), (100, 5), (2000, 100), (10**6, 100)]
)
def test_the_warm_up_is_a_twentieth_of_the_job_and_at_most_100_steps(steps, warmup):
    config = tiny(learningRate=1.0)
    assert gpt.learning_rate(config, step=warmup, steps=steps) == 1.0
    assert all(gpt.learning_rate(config, step=s, steps=steps) < 1.0 for s in range(warmup))


def test_steps_beyond_the_end_do_not_raise_the_rate_again():
    assert gpt.learning_rate(tiny(), step=150, steps=100) == 0.0


# ---------------------------------------------------------------- loop


class FakeClock(SimpleNamespace):
    """Processor time advances by one second per call; other programs make each last a minute."""

    def __init__(self):
        self.now, self.slept = 0.0, []
        super().__init__()

    def thread_time(self):
        self.now += 1.0
        return self.now

    def monotonic(self):
        return 60 * self.thread_time()

    def sleep(self, seconds):
        self.slept.append(seconds)


def test_slowdown_multiplies_the_processor_time_of_a_step(text, monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(gpt, "time", clock)
    gpt.train(tiny(data=text, slowdown=5, device="cpu"), seed=1, steps=3)
    assert clock.slept == [4.0, 4.0, 4.0]


def test_training_without_a_job_is_reproducible_bit_for_bit(text):
    first, second = (gpt.train(tiny(data=text), seed=1, steps=5) for _ in range(2))
    assert digest(first) == digest(second)
    assert digest(first) != digest(gpt.GPT(tiny(), seed=1))


def test_the_loop_follows_the_learners_global_step_and_its_own_data(text, monkeypatch):
    seen = {"steps": [], "batches": [], "calls": []}

    class FakeLearner:
        """Rejoined at local step 40, with the job at step 70 of 200; done after three steps."""

        name, local_step, step_index, total_steps = "us/1", 40, 70, 200

        @property
        def done(self):
            return len(seen["calls"]) == 3

        def step(self, *, tokens, loss):
            seen["calls"].append((tokens, float(loss)))
            self.local_step += 1
            self.step_index += 2

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    rate, batch = gpt.learning_rate, data.batch
    monkeypatch.setattr(gpt, "Learner", SimpleNamespace(connect=lambda *a, **k: FakeLearner()))
    monkeypatch.setattr(
        gpt,
        "learning_rate",
        lambda config, *, step, steps: (
            seen["steps"].append((step, steps)) or rate(config, step=step, steps=steps)
        ),
    )
    monkeypatch.setattr(
        data,
        "batch",
        lambda *a, **k: seen["batches"].append((k["learner"], k["step"])) or batch(*a, **k),
    )
    gpt.train(tiny(data=text), seed=1, steps=100)
    assert seen["steps"] == [(70, 200), (72, 200), (74, 200)]
    assert seen["batches"] == [("us/1", 40), ("us/1", 41), ("us/1", 42)]
    assert [tokens for tokens, _ in seen["calls"]] == [64, 64, 64]
    assert all(4 < loss < 7 for _, loss in seen["calls"])


@pytest.mark.slow
def test_the_program_trains_without_a_job_and_prints_its_validation_loss(text):
    done = alone("--steps", "40", "--config", json.dumps(TINY | {"data": text}))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loss"] < 3.0


@pytest.mark.slow
def test_a_wrong_config_ends_the_program_with_one_line_and_no_retry():
    done = alone("--config", '{"layers": "four", "width": "wide"}')
    assert done.returncode == EXIT_REFUSED
    assert done.stderr.strip().splitlines() == [
        "config.layers: 'four' is not a whole number; config.width: 'wide' is not a whole number"
    ]


# ---------------------------------------------------------------- scorer


def test_the_initial_weights_of_the_scorer_are_those_of_a_learner(text):
    scorer = gpt.Scorer(TINY | {"data": text}, seed=7)
    start = gpt.GPT(tiny(), seed=7).state_dict()
    assert {n: a.tolist() for n, a in scorer.initial().items()} == {
        n: t.tolist() for n, t in start.items()
    }


def test_a_score_is_the_mean_loss_of_the_validation_text(text):
    raw = TINY | {"data": text, "validationTokens": 1000}
    model, _ = trained()
    score = gpt.Scorer(raw, seed=7)(gpt.weights_of(model))
    corpus = gpt.load_data(config_reader.read(gpt.Config, raw))
    windows = data.validation_windows(corpus.validation, tokens=1000, context=16)
    assert len(windows) > 16
    expected = gpt.loss_of(model, windows, tiny(), CPU).item()
    assert score["loss"] == pytest.approx(expected, rel=1e-5)
    assert score["bitsPerByte"] == pytest.approx(expected / math.log(2), rel=1e-5)


def test_weights_of_another_model_are_refused_with_a_message(text):
    scorer = gpt.Scorer(TINY | {"data": text}, seed=7)
    other = gpt.weights_of(gpt.GPT(tiny(layers=2), seed=7))
    with pytest.raises(ConfigError, match="does not match its recipe config"):
        scorer(other)
