"""
Properties that hold in every run, each a module of its own.

Begin with `checker`, their interface, and `observations`. Imports the contract (`diloco`), and of the
syncer its core, parameters and `sessions`; nothing else of the simulator.

They observe journal lines (mappings, as in events.jsonl) and decisions of the engine
(`diloco_syncer.core.events`), and raise `Violation` at the first that breaks a promise. They do not
read the state of what they check: they would believe what it believes.
"""
