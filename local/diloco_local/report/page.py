"""
Writes report.html and report.png of a run directory.

The page is self-contained: no script, no link, no network.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from diloco.journal.recoveries import MEANINGS
from diloco.runtime import files
from diloco.runtime.formatting import printable, size
from diloco_local.report import costs, distance, faults
from diloco_local.report.plot import draw
from diloco_local.report.run_files import F64, LearnerRun, Run, load
from diloco_local.report.style import quantity

DOTS_PER_INCH = 110
MAX_VIOLATIONS = 20
MAX_RECOVERIES = 100


def write_report(run_dir: Path) -> None:
    """
    Write report.png and report.html from the current content of a run directory.

    Works for a run that has just started as well as for a complete one; files are replaced atomically.

    Raises:
        OSError: the directory cannot be written.
    """
    run = load(run_dir)
    buffer = io.BytesIO()
    draw(run).savefig(buffer, format="png", dpi=DOTS_PER_INCH)
    files.replace(run_dir / "report.png", buffer.getvalue())
    files.replace(run_dir / "report.html", page(run, buffer.getvalue()).encode())


def page(run: Run, png: bytes) -> str:
    """The HTML page, with the figure embedded."""
    image = base64.b64encode(png).decode()
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{_e(run.name)} – DiLoCo report</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{_STYLE}</style></head><body>
<h1>{_e(run.name)} <span class="state">{_e(run.state)}</span></h1>
{_progress(run)}
<div class="cards">{"".join(_card(*card) for card in _cards(run))}</div>
{_audit(run)}
{_chaos(run)}
<img alt="losses, processes, weights, merges, bytes, tokens/s, times, norms, rates" src="data:image/png;base64,{image}">
<h2>Learners</h2>
{_learners(run)}
{_recoveries(run)}
{_metrics(run)}
{_sample(run)}
{_distance(run)}
<h2>Spec</h2>
{_table(["field", "value"], ([key, str(value)] for key, value in sorted(run.spec.items())))}
</body></html>
"""


def _cards(run: Run) -> list[tuple[str, str]]:
    steps = f"{run.step:,}" + (f" / {run.steps:,}" if run.steps else "")
    merges = run.merges
    return [
        ("step", steps),
        ("tokens", quantity(run.tokens)),
        ("validation loss", _loss(_last(run.scores.loss))),
        ("training loss", _loss(_mean(_final_loss(learner) for learner in run.learners))),
        ("merges", f"{merges.step.size:,}"),
        ("learners per merge", f"{np.mean(merges.members):.2f}" if merges.step.size else "–"),
        ("up / down", f"{quantity(merges.bytes_up.sum())}B / {quantity(merges.bytes_down.sum())}B"),
        ("restarts", f"{sum(learner.restarts for learner in run.learners)}"),
        *([("suspensions", f"{len(run.suspensions)}")] if run.suspensions else []),
        ("syncer epochs", f"{len(run.epochs)}"),
        ("time", _clock(run.seconds)),
    ]


def _progress(run: Run) -> str:
    if not run.steps:
        return ""
    percent = min(100.0, 100 * run.step / run.steps)
    return f'<div class="bar"><div style="width:{percent:.1f}%"></div></div>'


def _audit(run: Run) -> str:
    found = run.audit
    messages = [*found.violations[:MAX_VIOLATIONS], *found.notes[:MAX_VIOLATIONS]]
    if (more := len(found.violations) - MAX_VIOLATIONS) > 0:
        messages.append(f"and {more} more violations")
    items = "".join(f"<li>{_e(message)}</li>" for message in messages)
    kind = "kept" if found.ok else "broken"
    return f'<div class="audit {kind}"><b>Audit.</b> {_e(found.verdict)}<ul>{items}</ul></div>'


def _chaos(run: Run) -> str:
    if run.chaos is None:
        return ""
    buffer = io.BytesIO()
    faults.draw(run, run.chaos).savefig(buffer, format="png", dpi=DOTS_PER_INCH)
    image = base64.b64encode(buffer.getvalue()).decode()
    items = "".join(f"<li>{_e(line)}</li>" for line in costs.summary(run, run.chaos))
    return (
        f"<h2>Injected faults</h2><ul>{items}</ul>"
        f'<img alt="faults, loss and goodput over time" src="data:image/png;base64,{image}">'
    )


def _learners(run: Run) -> str:
    head = [
        "learner", "incarnations", "restarts", "merges", "of all merges", "local steps", "tokens", "final loss",
        "median step", "median learner.step()", "refusals",
    ]  # fmt: skip
    total = run.merges.step.size
    return _table(
        head,
        (
            [
                learner.name,
                f"{len(learner.lifetimes)}",
                f"{learner.restarts}",
                f"{learner.merge_times.size:,}",
                f"{learner.merge_times.size / total:.0%}" if total else "–",
                f"{learner.steps.last_local_step:,}",
                quantity(learner.tokens),
                _loss(_final_loss(learner)),
                _milliseconds(learner.steps.seconds),
                _milliseconds(learner.steps.sync_seconds),
                ", ".join(f"{reason} {count:,}" for reason, count in learner.refusals.items())
                or "–",
            ]
            for learner in run.learners
        ),
    )


def _recoveries(run: Run) -> str:
    """The newest processes that began after step 0."""
    if not run.audit.recoveries:
        return ""
    head = [
        "learner",
        "incarnation",
        "step",
        "continues with",
        "of",
        "steps old",
        "size",
        "time",
        "why not of a peer",
    ]
    rows = (
        [
            found.learner,
            f"{found.incarnation}",
            f"{found.step:,}",
            MEANINGS.get(found.source, found.source),
            found.peer or "–",
            f"{found.age:,}" if found.state_step else "–",
            size(found.bytes) if found.bytes else "–",
            f"{found.seconds:.1f} s" if found.seconds else "–",
            found.problem or "–",
        ]
        for found in reversed(run.audit.recoveries[-MAX_RECOVERIES:])
    )
    return f"<h2>Recovery</h2><p>{_e(run.audit.recovery)}</p>{_table(head, rows)}"


def _metrics(run: Run) -> str:
    """The user's own numbers of the first and the last score that has them."""
    rows = []
    for name, values in run.scores.others.items():
        finite = values[np.isfinite(values)]
        numbers = (finite[0], finite[-1], finite.min(), finite.max())
        rows.append([name, *(f"{number:.6g}" for number in numbers)])
    if not rows:
        return ""
    head = ["metric", "first", "last", "smallest", "largest"]
    return f"<h2>Evaluation metrics</h2>{_table(head, rows)}"


def _sample(run: Run) -> str:
    if run.sample is None:
        return ""
    return f"<h2>Sample of the model</h2><pre>{_e(run.sample)}</pre>"


def _distance(run: Run) -> str:
    known = distance.known(run.spec)
    if not known:
        return ""
    return f"<h2>Distance to synchronous training</h2>{''.join(f'<p>{_e(line)}</p>' for line in known)}"


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    cells = "".join(f"<th>{_e(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{_e(cell)}</td>" for cell in row) + "</tr>\n" for row in rows
    )
    return f'<div class="wide"><table><tr>{cells}</tr>\n{body}</table></div>'


def _card(name: str, value: str) -> str:
    return f'<div class="card"><span>{_e(name)}</span>{_e(value)}</div>'


def _final_loss(learner: LearnerRun) -> float:
    """Mean of the last 5 %: the loss of a single batch is noisy."""
    loss = learner.steps.loss[np.isfinite(learner.steps.loss)]
    return float(np.mean(loss[-max(1, loss.size // 20) :])) if loss.size else math.nan


def _last(values: F64) -> float:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if finite.size else math.nan


def _mean(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "–"


def _milliseconds(seconds: F64) -> str:
    finite = seconds[np.isfinite(seconds)]
    if not finite.size:
        return "–"
    middle = float(np.median(finite))
    return f"{middle:.2f} s" if middle >= 0.9995 else f"{1e3 * middle:.3g} ms"


def _clock(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def _e(text: str) -> str:
    return html.escape(printable(text, lines=True))


_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#222;max-width:1180px;margin:2em auto;padding:0 1em}
h1{margin:0 0 .4em;font-size:1.7em}h2{margin:1.6em 0 .5em;font-size:1.15em}
.state{font-size:.55em;vertical-align:middle;background:#e8f1f8;color:#0072B2;border-radius:1em;
padding:.25em .8em}
.bar{background:#e8e8e8;border-radius:4px;height:8px}
.bar div{background:#0072B2;border-radius:4px;height:8px}
.cards{display:flex;flex-wrap:wrap;gap:.6em;margin:1em 0}
.card{border:1px solid #e0e0e0;border-radius:6px;padding:.45em .8em;font-size:1.1em;
font-variant-numeric:tabular-nums}
.card span{display:block;font-size:.7em;color:#666}
.audit{border-left:5px solid;padding:.5em .9em;margin:1em 0;background:#f7f7f7}
.audit ul{margin:.2em 0 0;padding-left:1.2em}
.kept{border-color:#009E73}.broken{border-color:#D55E00}
img{width:100%;height:auto}.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.88em;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.28em .7em;border-bottom:1px solid #e8e8e8;white-space:nowrap}
th{color:#555;font-weight:600}th:first-child,td:first-child{text-align:left}
pre{background:#f6f6f6;padding:1em;overflow-x:auto;white-space:pre-wrap;font-size:.85em}
"""
