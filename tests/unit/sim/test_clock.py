"""Virtual time: order, pauses, crashes, jumps, and a digest that is a function of the seed."""

import random

import pytest

from diloco_sim.clock import Clock, OverrunError


def world() -> tuple[Clock, list[tuple[float, str]]]:
    return Clock(), []


def test_events_run_in_the_order_of_their_times_and_ties_in_the_order_of_scheduling():
    clock, seen = world()
    for when, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
        clock.at(when, lambda n: seen.append((clock.now, n)), name)
    assert clock.run(1.5) == 2
    assert (clock.now, seen) == (1.5, [(1.0, "a"), (1.0, "b")])
    clock.run(9.0)
    assert seen[2:] == [(2.0, "c"), (2.0, "d")]
    assert clock.now == 9.0


def test_an_event_of_the_past_runs_now():
    clock, seen = world()
    clock.at(3.0, lambda: clock.at(1.0, lambda: seen.append((clock.now, "late"))))
    clock.run(5.0)
    assert seen == [(3.0, "late")]


def test_a_cancelled_timer_does_not_run():
    clock, seen = world()
    timer = clock.at(1.0, seen.append, (0.0, "x"))
    assert timer.pending
    clock.cancel(timer)
    assert not timer.pending
    assert clock.run(2.0) == 0
    assert seen == []


def test_a_world_without_end_is_an_error():
    clock = Clock()

    def again() -> None:
        clock.at(clock.now, again)

    again()
    with pytest.raises(OverrunError, match="100 events"):
        clock.run(1.0, most_events=100)


def test_stop_ends_the_run_after_the_present_event():
    clock, seen = world()
    clock.at(1.0, clock.stop)
    clock.at(2.0, seen.append, (2.0, "x"))
    clock.run(5.0)
    assert (clock.now, seen) == (1.0, [])
    clock.run(5.0)
    assert seen == [(2.0, "x")]


def test_events_of_a_paused_process_wait_in_their_order():
    clock, seen = world()
    process = clock.process("a")
    for i in range(5):
        clock.at(1.0 + i, lambda i: seen.append((clock.now, str(i))), i, process=process)
    clock.at(1.5, process.pause, 4.0)
    clock.run(10.0)
    assert seen == [(1.0, "0"), (4.0, "1"), (4.0, "2"), (4.0, "3"), (5.0, "4")]


def test_a_longer_pause_extends_one_that_runs():
    clock, seen = world()
    process = clock.process("a")
    clock.at(1.0, process.pause, 3.0)
    clock.at(2.0, process.pause, 5.0)
    clock.at(2.5, process.pause, 4.0)
    clock.at(2.0, lambda: seen.append((clock.now, "x")), process=process)
    clock.run(10.0)
    assert seen == [(5.0, "x")]
    assert process.running


def test_a_process_that_pauses_itself_keeps_the_rest_for_later():
    clock, seen = world()
    process = clock.process("a")
    process.pause(1.0)
    clock.at(0.5, lambda: process.pause(2.0), process=process)
    clock.at(0.6, lambda: seen.append((clock.now, "x")), process=process)
    clock.run(5.0)
    assert seen == [(2.0, "x")]


def test_a_pause_delays_work_but_not_deadlines():
    clock, seen = world()
    process = clock.process("a")
    process.work(3.0, lambda: seen.append((clock.now, "work")))
    process.after(4.0, lambda: seen.append((clock.now, "deadline")))
    clock.at(1.0, process.pause, 3.0)
    clock.run(10.0)
    assert seen == [(4.0, "deadline"), (5.0, "work")]


def test_a_slow_process_takes_longer_for_its_work():
    clock, seen = world()
    process = clock.process("a")
    process.slowness = 4.0
    process.work(0.5, lambda: seen.append((clock.now, "done")))
    clock.run(10.0)
    assert seen == [(2.0, "done")]


def test_a_thread_does_one_thing_at_a_time():
    clock, seen = world()
    thread = clock.process("a").thread()
    for name in "ab":
        thread.work(1.0, lambda n: seen.append((clock.now, n)), name)
    clock.run(5.0)
    assert seen == [(1.0, "a"), (2.0, "b")]


def test_a_pause_delays_what_a_thread_begins_later():
    clock, seen = world()
    process = clock.process("a")
    thread = process.thread()
    thread.work(2.0, lambda: seen.append((clock.now, "a")))
    clock.at(1.0, process.pause, 4.0)
    clock.at(4.5, lambda: thread.work(1.0, lambda: seen.append((clock.now, "b"))))
    clock.run(10.0)
    assert seen == [(5.0, "a"), (6.0, "b")]


def test_a_crash_drops_what_the_process_had_scheduled_also_after_its_restart():
    clock, seen = world()
    process = clock.process("a")
    clock.at(2.0, seen.append, (0.0, "old"), process=process)
    clock.at(1.0, process.crash)
    clock.at(1.2, lambda: clock.at(1.3, seen.append, (0.0, "to the dead"), process=process))
    clock.at(1.2, lambda: clock.at(1.7, seen.append, (0.0, "too early"), process=process))
    clock.at(1.5, process.start)
    clock.at(1.6, lambda: process.after(1.0, seen.append, (0.0, "new")))
    clock.run(5.0)
    assert seen == [(0.0, "new")]


def test_a_crash_ends_a_pause():
    clock, seen = world()
    process = clock.process("a")
    process.pause(9.0)
    clock.at(1.0, process.crash)
    clock.at(2.0, process.start)
    clock.at(3.0, lambda: process.work(0.0, seen.append, (0.0, "runs")))
    clock.run(4.0)
    assert seen == [(0.0, "runs")]


def test_a_jump_brings_deadlines_forward():
    clock, seen = world()
    process = clock.process("a")
    process.after(10.0, lambda: seen.append((clock.now, "deadline")))
    clock.at(8.0, lambda: seen.append((clock.now, "network")), process=process)
    clock.at(2.0, process.jump, 7.0)
    clock.run(20.0)
    assert seen == [(3.0, "deadline"), (8.0, "network")]
    assert process.now == 27.0
    process.set_wall(-100.0)
    assert (process.now, process.wall) == (27.0, -73.0)
    with pytest.raises(ValueError, match="cannot jump"):
        process.jump(-1.0)


def play(seed: int) -> int:
    """Processes that schedule each other at random, with pauses, crashes and jumps."""
    clock, source = Clock(), random.Random(seed)
    processes = [clock.process(f"p{i}") for i in range(4)]

    def act(depth: int) -> None:
        process = source.choice(processes)
        match source.randrange(12):
            case 0:
                process.pause(clock.now + source.random())
            case 1:
                process.jump(source.random())
            case 2 if process.alive:
                process.crash()
                clock.at(clock.now + source.random(), process.start)
        if depth:
            for _ in range(source.randrange(1, 3)):
                process.after(source.random(), act, depth - 1)

    for _ in range(20):
        clock.at(source.random(), act, 8)
    clock.run(30.0, most_events=100_000)
    return clock.digest


def test_the_digest_is_a_function_of_the_seed():
    digests = [play(seed) for seed in range(20)]
    assert digests == [play(seed) for seed in range(20)]
    assert len(set(digests)) == 20


def test_a_timer_never_fires_before_its_deadline_however_the_clock_has_jumped():
    """A program that sets a timer again until its deadline has come would do so without end."""
    clock, source = Clock(), random.Random(1)
    process = clock.process("p")
    early = []

    def fired(deadline: float) -> None:
        if process.now < deadline:
            early.append((process.now, deadline))

    process.jump(36.95)
    for _ in range(100):
        for _ in range(10):
            deadline = process.now + source.uniform(0.0, 5.0)
            process.at(deadline, fired, deadline)
        clock.run(clock.now + source.uniform(0.0, 5.0))
        process.jump(source.choice((0.0, 0.1)))
    clock.run(clock.now + 10.0)
    assert early == []
