"""
Properties that hold in every run, each a module of its own; `checker` has their interface.

They observe journal lines (mappings, as in events.jsonl) and decisions of the engine
(`diloco_syncer.core.events`), and raise `Violation` at the first that breaks a promise. They do not
read the state of what they check: they would believe what it believes.
"""
