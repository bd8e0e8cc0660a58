"""
The syncer: pulls fragments from learners, merges them, applies the outer optimizer, sends the result to all.

    core/       decisions, pure: engine (Algorithm 2), admission, learners, rounds, pacing, contributions
    merging/    the streaming merge of one fragment; numpy and numba, shared between threads
    storage/    parameters in memory; snapshots, counters and the exported model on disk
    rpc/        gRPC: control (sessions, status), uploads, downloads; translates between protos and values
    coordinator carries the engine's decisions out, without thread, clock, socket or disk
    runner      the one thread that owns the state: queue, clock, health file around the coordinator
    attempts, sessions, learner_messages, state, metrics, refusals    what coordinator, runner and rpc share
    settings, spec_file    command line and environment; the numbers of learners, followed while the syncer runs

Begin with core/engine.py, then coordinator.py. May import `diloco` (the contract), never another program or torch.
"""
