"""Entry point of experiments: `python -m diloco_experiment`, started by `diloco experiment`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from diloco.errors import EXIT_USAGE, ConfigError, DilocoError
from diloco.runtime.formatting import printable
from diloco_experiment import pool, study
from diloco_experiment.results import Folder

EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a study; 0: every cell has a result, 1: not every one, 2: the study is not valid, 130: interrupted."""
    parser = argparse.ArgumentParser(prog="diloco experiment")
    parser.add_argument("file", type=Path)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(arguments)
    try:
        found, manifest = study.load(options.file)
        cells = study.cells(found, manifest)
        path = options.dir or Path("runs") / found.name
        bad = pool.run(found, cells, Folder(path), jobs=options.jobs, show=_show)
    except ConfigError as error:
        print(printable(str(error), lines=True), file=sys.stderr)
        return EXIT_USAGE
    except (DilocoError, OSError) as error:
        print(printable(str(error), lines=True), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        _show("interrupted: the same command continues with the cells that are missing")
        return EXIT_INTERRUPTED
    _show(f"{path}/report.html, results.csv, summary.csv" + (f"; {bad} failed" if bad else ""))
    return 1 if bad else 0


def _show(line: str) -> None:
    print(printable(line), flush=True)


if __name__ == "__main__":
    pool.one_thread()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
