"""
events.jsonl, the record of a run: `records` (one class per kind of event), `parts` (its
files), `writer`, `background` (the writer for threads that must not wait), `reader`, and
`audit`, which proves from the file alone that a run merged only what it may.

Imports model, runtime and errors. Begin with `records`.
"""
