"""
events.jsonl, the record of a run: `records` (one class per kind of event), `parts` (its
files), `writer`, `background` (the writer for threads that must not wait), `reader`, and
`audit`, which proves from the file alone that a run merged only what it may.

With tape.jsonl of each learner (`tape`) it is the tape of the run: `replay` makes of it what each
worker must do to end with the same bits, `replay_files` reads it, and `tape_text` prints it.

Imports model, runtime, spec and errors. Begin with `records`.
"""
