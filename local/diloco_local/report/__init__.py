"""
report.html and report.png of a run.

Begin with `run_files` (the contents of a run directory), then `plot` and `details` (the figure, with `style`) and
`page` (the HTML). Imports numpy, matplotlib and the contract; nothing else in the project reads its output.
"""
