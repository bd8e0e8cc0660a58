"""
The DiLoCoJob: types, rules, CEL, CRD, manifest parsing, plan, names, reasons of conditions.

Pure: no clock, socket, file, thread or environment. Imports the contract (`diloco`), pydantic and
yaml. Begin with `types` (the manifest), then `rules` (between fields) and `plan` (what to run).
"""
