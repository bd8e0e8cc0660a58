"""
Names, messages and pages use one word for one thing, and the word of the field (CONTRIBUTING.md, "Names and style").

Each list has words that were once used for other things, with what to write instead.
"""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "protos", "job", "agent", "syncer", "worker", "operator", "local", "cli", "sim", "experiment",
)  # fmt: skip
CODE = [
    path
    for folder in (*PACKAGES, "benchmarks", "examples", "scripts", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_pb2" not in path.name
]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md"),
         *(ROOT / "tests").rglob("*.md"), *(ROOT / "charts").rglob("*.md"),
         *(ROOT / "benchmarks").rglob("*.md"), *(ROOT / ".github").rglob("*.md"),
         *(ROOT / "charts").rglob("NOTES.txt")]  # fmt: skip
OTHERS = [
    path
    for pattern in ("*.proto", "*.tpl", "*.yaml", "*.toml", "*.sh", "golden/scripts/*/*.txt")
    for folder in (".github", "protos", "charts", "examples", "scripts", "tests")
    for path in sorted((ROOT / folder).rglob(pattern))
] + [
    ROOT / name for name in ("pyproject.toml", "Dockerfile", "Makefile", ".pre-commit-config.yaml")
]
"""Files with comments, descriptions or messages that are neither Python nor pages."""

NAMES = {
    "nobody|nobodys": "no learner, not",
    "say|says|said": "announce, log, show, state, message",
    "tell|tells|told": "report, notify, announce, distinguish",
    "hear|hears|heard": "receive",
    "bury|buries": "reap",
    "course": "phase",
    "situation": "job_state",
    "tally": "counts",
    "podfacts": "pods",
    "leash": "process_guard",
    "vitals": "heartbeat",
    "complain|complaint|complaints": "report_event, reported_problem",
    "liar|liars": "misbehaving",
}
"""Words of identifiers, of tests too."""

TESTS = {
    "somebody|someone|everybody|anybody|whoever": "the subject: a learner, all learners",
    "stranger|strangers": "untrusted peer, non-member",
    "mend|mends|mended": "fix, heal",
    "away": "unavailable",
    "(goes|go|went|gone|going)_on": "continues",
    "(given|gives|give|gave)_up": "aborted, failed, timed out",
    "(bear|bears|bore|borne)_(out|its_steps_out)": "confirm",
    "any_more": "no longer",
    "all_the_same": "still",
    "taken_in": "rejoins",
    "(is|are)_no_(report|number|address|decimal)": "is not a",
}
"""Words of the names of tests, besides NAMES."""

TEXT = {
    r"says?|said": "states, shows, logs",
    r"tells?|told": "reports, notifies, shows",
    r"hears?|heard": "receives, observes",
    r"look(s|ed|ing)? at": "inspect, check",
    r"(goes|go|going|went) on": "continues",
    r"(given|gives?|gave) (\w+ ){0,4}up(?! to)": "aborted, failed, released",
    r"(is|are|was|were) away": "unavailable",
    r"taken in again": "rejoins",
    r"all the same": "still",
    r"nobody|somebody|someone|everybody|anybody|whoever": "the subject",
    r"any ?more(?! than)": "no longer",
    r"in the words of": "the message from",
    r"mend(s|ed|ing)?": "fix",
    r"strangers?": "untrusted peers",
    r"liars?": "members that report false numbers",
    r"is no (decimal|number|list|address|report|JSON|DNS)": "is not a",
    r"anew": "again, starts over, with new state",
    r"for lack of memory": "OOM, because memory ran out",
    r"(stands?|stood|standing) still": "is paused, stops responding",
    r"for ever": "indefinitely, forever",
    r"in(to)? words": "as text",
    r"both powers": "the permissions, by name",
    r"now and then": "occasionally",
    r"one's own": "your own, the user's own",
    r"replac(e|es|ing) (\w+ ){1,6}by(?! (one|it|them))": "replace … with",
    r"also (if|when|where|while|after|with|without)": "even if, even with, including",
    r"(is|are) not yours": "that you cannot change",
    r"initialise[drs]?|behaviour|(synchron|optim|normal|quant|vector|orthogonal)is\w+": "the spelling of US English",
}
"""Words of messages and pages. `code` on a page does not count."""

COMMENTS = {
    word: better
    for word, better in TEXT.items()
    if not word.startswith(("tells?", "initialise", "also"))
} | {
    r"tells|told": "reports, distinguishes",
    r"(synchron|optim|normal|quant|vector|orthogonal)is\w+": "the spelling of US English",
}
"""
Words of comments and docstrings, and of files that are neither Python nor pages: there "too few to tell" is
idiomatic, and names may have another spelling.
"""

ACCEPTED = {"seconds_since_heard": "a field of syncer.proto"}
"""Names that stay, with the reason."""


def found(words: dict[str, str], text: str, edge: str) -> list[str]:
    """What to write instead of each of these words that the text has."""
    return [
        f'"{match[0]}": write {better}'
        for word, better in words.items()
        if (match := re.search(rf"(?<!{edge})(?:{word})(?!{edge})", text, re.IGNORECASE))
    ]


@functools.cache
def in_name(name: str) -> list[str]:
    """The banned words of an identifier, in snake_case or CamelCase."""
    if name in ACCEPTED:
        return []
    words = NAMES | TESTS if name.startswith("test_") else NAMES
    return found(words, re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name), "[A-Za-z0-9]")


def in_text(text: str) -> list[str]:
    """The banned words of a message or a page."""
    return found(TEXT, text, r"\w") if ANY.search(text.lower()) else []


ANY = re.compile("|".join(rf"\b(?:{word})\b" for word in TEXT | COMMENTS).lower())
"""Seldom found, and faster than one search for each word."""


def lines_with_problems(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Line and hint for the banned words of comments."""
    return ((number, hint) for number, text in lines for hint in in_comment(text))


def in_comment(text: str) -> list[str]:
    """The banned words of a comment or a docstring. `code` does not count."""
    if not ANY.search(text.lower()):
        return []
    return found(COMMENTS, re.sub(r"`[^`\n]*`", "", text), r"\w")


def names(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of everything that a module defines: functions, classes, arguments, variables."""
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def called_one(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Lines in which a variable, an argument or a function is called `one`: it is a learner, a pod, a job."""
    for node in nodes:
        match node:
            case ast.Name(id="one", ctx=ast.Store()) | ast.arg(arg="one"):
                yield node.lineno
            case ast.FunctionDef(name="one") | ast.AsyncFunctionDef(name="one"):
                yield node.lineno


def messages(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of the string literals with more than one word that are not docstrings."""
    documented = {
        id(node.value)
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in nodes:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if " " in node.value and id(node) not in documented:
            yield node.lineno, node.value


def comments(source: str, nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of the comments, and of each line of the docstrings."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield from enumerate(text.split("\n"), start=node.lineno)


def problems(source: str, *, shipped: bool) -> list[str]:
    """What to rename or rephrase in a module; of tests and scripts, only the messages of `assert` count."""
    nodes = list(ast.walk(ast.parse(source)))
    lines = [(line, hint) for line, name in names(nodes) for hint in in_name(name)]
    if ANY.search(source.lower()):  # seldom, and the rest takes most of the time
        lines += lines_with_problems(comments(source, nodes))
    lines += [(line, '"one": write learner, pod, job') for line in called_one(nodes)]
    if not shipped:
        asserted = [node.msg for node in nodes if isinstance(node, ast.Assert) and node.msg]
        nodes = [node for message in asserted for node in ast.walk(message)]
    lines += [(line, hint) for line, text in messages(nodes) for hint in in_text(text)]
    return [f"line {line}: {hint}" for line, hint in lines]


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize(
    "folder",
    [*PACKAGES, "benchmarks", "examples", "scripts", pytest.param("tests", marks=pytest.mark.slow)],
)
def test_names_messages_and_comments_use_the_words_of_the_field(folder):
    wrong = [
        f"{place(path)}, {problem}"
        for path in CODE
        if path.is_relative_to(ROOT / folder) and path != Path(__file__)
        for problem in problems(path.read_text(), shipped=folder in PACKAGES)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=place)
def test_a_page_uses_the_words_of_the_field(page):
    text = re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", "", page.read_text(), flags=re.DOTALL)
    wrong = [
        f"line {line}: {problem}"
        for line, words in enumerate(text.split("\n"), start=1)
        for problem in in_text(words)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", OTHERS, ids=place)
def test_a_file_of_another_language_uses_the_words_of_the_field(path):
    lines = enumerate(path.read_text().split("\n"), start=1)
    wrong = [f"line {line}: {problem}" for line, problem in lines_with_problems(lines)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "word", "better"),
    [
        ("# Nobody waits for it.", "Nobody", "the subject"),
        ('def f():\n    """It is told why."""', "told", "reports"),
        ('x = 1\n"""It gives the job up."""', "gives the job up", "aborted"),
        ("def say_once(): ...", "say", "announce"),
        ("class JobSituation: ...", "Situation", "job_state"),
        ("def f(told): ...", "told", "report"),
        ("self.heard_at = 1", "heard", "receive"),
        ("def test_the_syncer_is_told_why(): ...", "told", "report"),
        ("def test_it_goes_on_while_the_syncer_is_away(): ...", "away", "unavailable"),
        ("async def test_it_goes_on_without_them(): ...", "goes_on", "continues"),
        ("def test_nobody_is_late(): ...", "nobody", "no learner"),
        ("f(one for one in lost)", "one", "learner"),
        ("sorted(pods, key=lambda one: one.name)", "one", "pod"),
        ("one, other = learners", "one", "learner"),
        ("def one(group): ...", "one", "learner"),
        ("def nobody_returns(): ...", "nobody", "no learner"),
        ("# Quantisation of a block.", "Quantisation", "US English"),
        ("# The count begins anew.", "anew", "starts over"),
        ('log.info("the process stood still for %s s", seconds)', "stood still", "is paused"),
        ('raise OSError("killed for lack of memory")', "for lack of memory", "OOM"),
        ('log.info("it waits, also if it is late")', "also if", "even if"),
        (
            "# It replaces all files by those of the copy.",
            "replaces all files by",
            "replace … with",
        ),
        ('log.info("the syncer was not told of it: %s", error)', "told", "reports"),
        ('raise ValueError(f"{text} is no number")', "is no number", "is not a"),
        ('log.info(f"{name} does not run any more; it failed")', "any more", "no longer"),
    ],
)
def test_a_word_that_is_used_for_something_else_is_found_with_its_replacement(source, word, better):
    (problem,) = [found for found in problems(source, shipped=True) if f'"{word}"' in found]
    assert problem.startswith("line ")
    assert better in problem


@pytest.mark.parametrize(
    "source",
    [
        "def announce(): ...",
        "essay = saying = 1",
        "seconds_since_heard = 0.0",
        "def test_one_report_fills_no_quorum_twice(): ...",
        "for learner in lost: ...",
        "# Too few learners to tell.",
        "# At t the range is given from 0 up to H.",
        '"""The `said` of another program."""',
        'log.info("the job needs any more than one learner")',
    ],
)
def test_other_words_are_allowed(source):
    assert problems(source, shipped=True) == []
