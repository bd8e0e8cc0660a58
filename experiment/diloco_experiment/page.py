"""
Writes report.html and report.png of a study: one self-contained page, without script or network.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Iterable, Sequence

import yaml

from diloco.runtime import files
from diloco.runtime.formatting import printable
from diloco_experiment import summary
from diloco_experiment.plot import draw
from diloco_experiment.results import Folder, Result
from diloco_experiment.study import Cell, Study
from diloco_local.report.style import quantity

DOTS_PER_INCH = 110
MAX_ROWS = 500
"""Of a table; results.csv has all."""


def write(study: Study, cells: Sequence[Cell], folder: Folder) -> None:
    """
    Write the page of what is there now.

    Raises:
        OSError: the directory cannot be written.
    """
    pairs = ((cell.digest, folder.read(cell.digest)) for cell in cells)
    results = {digest: result for digest, result in pairs if result is not None}
    groups = summary.groups(cells, results)
    buffer = io.BytesIO()
    draw(study.name, groups, results).savefig(buffer, format="png", dpi=DOTS_PER_INCH)
    folder.path.mkdir(parents=True, exist_ok=True)
    files.replace(folder.path / "report.png", buffer.getvalue())
    files.replace(
        folder.path / "report.html", page(study, cells, results, groups, buffer.getvalue())
    )


def page(
    study: Study, cells: Sequence[Cell], results: dict[str, Result], groups: Sequence[summary.Group],
    png: bytes,
) -> str:  # fmt: skip
    """The HTML page, with the figure embedded."""
    image = base64.b64encode(png).decode()
    ended = sum(cell.digest in results for cell in cells)
    bad = [(cell, results[cell.digest]) for cell in cells if cell.digest in results]
    bad = [(cell, result) for cell, result in bad if result.detail]
    fields = study.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{_e(study.name)} – DiLoCo experiment</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{_STYLE}</style></head><body>
<h1>{_e(study.name)}</h1>
<p>{ended} of {len(cells)} cells have ended.</p>
<img alt="loss over steps; distance to synchronous training" src="data:image/png;base64,{image}">
<h2>Groups</h2>
{_groups(study, groups)}
{_problems(bad)}
<h2>Study</h2>
<pre>{_e(yaml.safe_dump(fields, sort_keys=False))}</pre>
</body></html>
"""


def _groups(study: Study, groups: Sequence[summary.Group]) -> str:
    head = ["method", "scenario", "variant", *study.grid, *(f"best {path}" for path in study.sweep)]
    tokens = "tokens", "merged tokens, of Synchronous"
    return _table(
        [*head, "seeds", "loss", "± deviation", "distance", *tokens, "not ok", "missing"],
        (
            [
                group.method, group.scenario, group.variant, *(str(value) for _, value in group.grid),
                *(str(value) for _, value in group.best), str(len(group.losses)),
                _number(group.mean, ".4f"), _number(group.deviation, ".4f"),
                _number(group.distance, "+.2f", " %"), quantity(group.tokens),
                _number(100 * group.tokens_ratio, ".1f", " %"),
                str(group.others), str(group.missing),
            ]
            for group in groups[:MAX_ROWS]
        ),
    )  # fmt: skip


def _problems(bad: Sequence[tuple[Cell, Result]]) -> str:
    if not bad:
        return ""
    rows = ([cell.label, result.status, result.detail[:300]] for cell, result in bad[:MAX_ROWS])
    return f"<h2>Cells that did not end well</h2>{_table(['cell', 'status', 'why'], rows)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{_e(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{_e(c)}</td>" for c in row) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table><tr>{cells}</tr>\n{body}</table></div>'


def _number(value: float, form: str, unit: str = "") -> str:
    return f"{value:{form}}{unit}" if math.isfinite(value) else "–"


def _e(text: str) -> str:
    return html.escape(printable(text, lines=True))


_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#222;max-width:1180px;margin:2em auto;padding:0 1em}
h1{margin:0 0 .4em;font-size:1.7em}h2{margin:1.6em 0 .5em;font-size:1.15em}
img{width:100%;height:auto}.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.88em;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.28em .7em;border-bottom:1px solid #e8e8e8;white-space:nowrap}
th{color:#555;font-weight:600}th:first-child,td:first-child{text-align:left}
pre{background:#f6f6f6;padding:1em;overflow-x:auto;font-size:.85em}
"""
