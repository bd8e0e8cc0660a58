"""
A deterministic simulator: one seed is one world of a syncer and its learners, under faults, in virtual time.

    clock     virtual time, the event queue, processes that pause, slow down and crash
    network   streams of real bytes (stream) over links that are slow, cut or half-open (wire)
    disk      files in memory that are slow, full, damaged, or lost at a power failure
    faults    a seeded plan of faults as values;  injector  carries it out
    checkers  properties that must hold in every run
    shrink    makes a failing world smaller while it still fails

Nothing here reads a real clock, socket or file, and every random number comes from one seed. Imports the
contract (`diloco`), `diloco_syncer` and `diloco_worker`. Begin with `clock`.
"""
