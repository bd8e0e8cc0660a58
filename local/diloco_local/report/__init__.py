"""
report.html and report.png of a run.

Begin with `run_files` (the contents of a run directory), then `plot` and `details` (the figure, with `style`) and
`page` (the HTML); `costs` and `faults` show injected faults. Imports numpy, matplotlib, the contract and `faults` of
the local runtime; nothing else in the project reads its output.
"""
