"""The pages say what the code does: the README's example runs, help is what is printed, links lead somewhere."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptstore
from ckptstore import errors
from ckptstore_cli import exits
from ckptstore_cli.main import run
from tests.support import help_pages
from tests.test_layers import LIVE

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("manifests/**/*.md")])
DECISIONS = sorted(ROOT.glob("docs/decisions/*.md"))

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
decisions = pytest.mark.parametrize("record", DECISIONS, ids=lambda record: record.stem)


def fenced(text: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language, "" for those without."""
    return [block for named, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if named == language]


def rows(text: str, header: str) -> list[list[str]]:
    """Cells of the table whose first line is ``header``."""
    lines = text[text.index(header) :].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in _while_table(lines)]


def _while_table(lines: list[str]) -> Iterator[str]:
    return itertools.takewhile(lambda line: line.startswith("|"), lines)


# -- the README's example ---------------------------------------------------------------------------------------------

# Forks after the imports, which take the most time: each run is a process of its own, and one of them is killed.
DRIVER = """
import os, signal, sys
import ckptstore, numpy, torch
source, killing, *folders = sys.argv[1:]
for folder in folders:
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        exec(compile(open(killing if folder.endswith("killed") else source).read(), "README.md", "exec"), {})
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if folder.endswith("killed"):
        os.rename(folder, folder.removesuffix("killed") + "again")
"""


def example() -> str:
    """The README's loop, with forty steps in place of a thousand."""
    (text,) = fenced(README, "python")
    assert text.count("1000") == 2
    assert text.count("% 100 ") == 1
    return text.replace("1000", "40").replace("% 100 ", "% 10 ")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``whole``, where the example ran in one go, and ``again``, where it was killed and run again."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("whole", "killed"):
        (folder / name).mkdir()
    scripts = ("example.py", "killed.py")
    (folder / scripts[0]).write_text(example())
    counts = "        step += 1\n"
    assert example().count(counts) == 1
    killed = example().replace(counts, f"{counts}        if step == 25:\n            os.kill(os.getpid(), 9)\n")
    (folder / scripts[1]).write_text(f"import os\n{killed}")
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *(folder / name for name in (*scripts, "whole", "killed", "again"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["0", "-9", "0"], "")
    return folder


def test_the_example_killed_and_run_again_ends_in_the_root_of_the_run_that_was_not(trained: Path) -> None:
    whole, again = (ckptstore.open(trained / name / "ckpts") for name in ("whole", "again"))
    head = whole.head("main")
    assert head is not None
    assert again.head("main") == head
    assert whole.checkpoint(head).step == 40
    assert again.verify("main").findings == ()
    # It was resumed and not begun anew: one record a checkpoint, and each checkpoint once.
    assert [record.generation for record in again.refs.log("main")] == [4, 3, 2, 1]


def test_every_command_after_the_example_runs_as_it_stands_there(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained / "whole")
    lines = [line for text in fenced(README, "sh") if text.startswith("ckpt ") for line in text.splitlines()]
    first = min(ckptstore.open("ckpts").history(_head("ckpts")), key=lambda pair: pair[1].step)[0]
    codes = []
    for line in lines:
        words = shlex.split(line, comments=True)
        assert words[0] == "ckpt"
        verb = words[3 if words[1] == "--store" else 1]
        codes.append((verb, run([first.hex[:12] if word == "3f2a" else word for word in words[1:]])))
    out, err = capsys.readouterr()
    expected = [("log", 0), ("verify", 0), ("diff", 1), ("push", 0), ("restore", 0)]
    expected += [("init", 0), ("remote", 0), ("plan", 0), ("push", 0), ("durability", 0)]
    expected += [(verb, 0) for verb in ("doctor", "latest", "repair", "scrub", "pin", "gc")]
    assert codes == expected, err
    assert err == ""
    assert "nothing is wrong" in out
    assert _head("copy") == _head("ckpts")
    assert (trained / "whole" / "plain" / "checkpoint.json").is_file()


def _head(store: str) -> ckptstore.Digest:
    head = ckptstore.open(store).head("main")
    assert head is not None
    return head


# -- commands ---------------------------------------------------------------------------------------------------------


def test_every_command_has_its_help_in_the_page_about_them() -> None:
    blocks = help_pages.blocks(help_pages.PAGE.read_text("utf-8"))
    assert sorted(blocks) == sorted(help_pages.commands())


@pytest.mark.parametrize("words", help_pages.commands())
def test_a_help_page_in_the_docs_is_what_the_command_prints(words: str) -> None:
    """`make docs` writes them."""
    assert help_pages.blocks(help_pages.PAGE.read_text("utf-8"))[words] == help_pages.help_page(words)


@pages
def test_every_command_line_in_the_docs_can_be_typed(page: Path) -> None:
    known = set(help_pages.commands())
    for block in fenced(page.read_text("utf-8"), "sh"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if not words or words[0] != "ckpt":
                continue
            while words[1].startswith("-"):
                words[1:3] = []
            name = max((name for name in known if words[: name.count(" ") + 1] == name.split()), key=len)
            assert name != "ckpt", line
            options = {word.split("=")[0] for word in words if word.startswith("-")}
            assert options <= set(re.findall(r"(?<![\w-])--?[a-z-]+", help_pages.help_page(name))), line


def test_every_target_and_variable_of_make_in_the_docs_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = {name for line in re.findall(r"^\.PHONY: (.*)$", makefile, re.M) for name in line.split()}
    assert targets == set(re.findall(r"^([a-z]+):", makefile, re.M))
    variables = set(re.findall(r"^([A-Z_]+) \?=", makefile, re.M))
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        text = page.read_text("utf-8")
        typed = [*re.findall(r"^make\b(.*?)(?:#.*)?$", text, re.M), *re.findall(r"`make\b([^`]*)`", text)]
        assert typed
        for words in map(shlex.split, typed):
            assert {word for word in words if "=" not in word} <= targets, words
            assert {word.split("=")[0] for word in words if "=" in word} <= variables, words
        assert set(re.findall(r"`([A-Z_]+)=", text)) <= variables | {"CKPT_DEBUG"}


def test_help_of_make_lists_every_target() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert set(re.findall(r"^ *make ([a-z]+) ", done.stdout, re.M)) == set(re.findall(r"^([a-z]+):", makefile, re.M))


# -- exit codes -------------------------------------------------------------------------------------------------------


def error_codes(base: type[errors.CkptStoreError], room: str) -> dict[str, int]:
    """Exit code by code, of all errors that a package defines."""
    found = {}
    for kind in base.__subclasses__():
        if kind.__module__.split(".")[0] == room and "code" in vars(kind):
            found[kind.code] = kind.exit_code
        found |= error_codes(kind, room)
    return found


def import_all(room: str) -> None:
    """Import the modules of a package that define errors."""
    for path in (ROOT / room).rglob("*.py"):
        tree = ast.parse(path.read_bytes())
        if any(isinstance(node, ast.ClassDef) and node.name.endswith("Error") for node in tree.body):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def test_the_table_of_exit_codes_is_that_of_the_code() -> None:
    import_all("ckptstore")
    design = (ROOT / "docs" / "design.md").read_text("utf-8")
    written = {
        int(number): set(re.findall(r"`([a-z-]+)`", codes)) for number, codes, _ in rows(design, "| exit | code |")
    }
    actual: dict[int, set[str]] = {code: set() for code in (*exits.MEANINGS, 141)}
    for code, number in error_codes(errors.CkptStoreError, "ckptstore").items():
        actual[number].add(code)
    actual[exits.INTERNAL].add("internal")
    actual[exits.INTERRUPTED].add("interrupted")
    assert written == actual


def test_the_trainers_codes_are_those_of_the_code() -> None:
    import_all("trainer")
    design = (ROOT / "docs" / "design.md").read_text("utf-8")
    sentence = design[design.index("Its own errors are") :].split(". ")[0]
    written = {
        code: int(number)
        for codes, number in re.findall(r"((?:`[a-z-]+`(?:, | and |\s)*)+)\((\d)\)", sentence)
        for code in re.findall(r"`([a-z-]+)`", codes)
    }
    assert written == error_codes(errors.CkptStoreError, "trainer")


# -- links, paths, records --------------------------------------------------------------------------------------------


@pages
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text("utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, (
                target
            )


@pytest.mark.parametrize("page", [page for page in PAGES if page not in DECISIONS], ids=lambda page: page.name)
def test_every_path_of_the_tree_in_a_page_is_there(page: Path) -> None:
    """Decisions are of their day, and name what was refused, too."""
    rooms = "ckptstore|cli|trainer|tests|docs|manifests|benchmarks"
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    for path in re.findall(rf"(?<![\w/.-])(?:{rooms})/[\w./*,{{}}-]*[\w/}}]", text):
        for one in braces(path):
            assert any(ROOT.glob(one)), path


def braces(path: str) -> list[str]:
    """``a/{b,c}.py`` as ``a/b.py`` and ``a/c.py``."""
    found = re.search(r"\{([^}]*)\}", path)
    return [path] if not found else [path[: found.start()] + part + path[found.end() :] for part in found[1].split(",")]


def test_the_tree_in_the_readme_is_that_of_the_folders() -> None:
    (tree,) = (text for text in fenced(README, "") if text.startswith("ckptstore/"))
    listed = {line.split()[0].rstrip("/") for line in tree.splitlines()}
    tracked = ["ckptstore", "cli", "trainer", "manifests", "benchmarks", "docs", "tests"]
    rooms = {path.parent for room in ("ckptstore", "trainer") for path in (ROOT / room).glob("*/__init__.py")}
    assert listed == {*tracked, *(path.relative_to(ROOT).as_posix() for path in rooms)}
    (tests,) = (line.split()[1:] for line in tree.splitlines() if line.startswith("tests/"))
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert {name.rstrip("/") for name in tests} == folders


@decisions
def test_a_decision_has_a_context_a_decision_and_a_consequence(record: Path) -> None:
    text = record.read_text("utf-8")
    assert re.fullmatch(r"\d{4}(-[a-z0-9]+)+", record.stem)
    assert re.match(rf"# (?:{record.stem[:4]}: |{int(record.stem[:4])}\. )\S", text)
    parts = re.findall(r"^(?:## |\*\*)(Context|Decision|Consequence)s?\b", text, re.M)
    assert parts == ["Context", "Decision", "Consequence"]


def test_the_rooms_of_live_tensors_in_contributing_are_those_that_a_test_holds() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    (listed,) = (line for line in text.splitlines() if "the only room that touches live tensors" in line)
    assert listed.split("`")[1].rstrip("/").replace("/", ".") in LIVE


def test_no_two_decisions_have_one_number_and_each_one_that_is_named_is_there() -> None:
    numbers = [record.stem[:4] for record in DECISIONS]
    assert len(numbers) == len(set(numbers))
    for page in PAGES:
        named = re.findall(r"(?:decision |\()(\d{4})\b(?=[) ,])", page.read_text("utf-8"))
        assert set(named) <= {*numbers, *(year for year in named if year.startswith("20"))}, page


def test_the_changelog_says_what_happens_to_stored_bytes() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    newest = changes.split("\n## ")[1]
    assert ckptstore.__version__ in newest.split("\n### ")[0]
    assert "\n### Format\n" in newest


# -- what stands nowhere ----------------------------------------------------------------------------------------------

SOURCES = [
    path
    for pattern in ("*.md", "Makefile", "pyproject.toml", ".ci/*", "docs/**/*.md", "manifests/**/*.md")
    for path in ROOT.glob(pattern)
] + [path for room in ("ckptstore", "cli", "trainer", "tests", "benchmarks") for path in (ROOT / room).rglob("*.py")]

# Split, so that this page is not found itself.
UNFINISHED = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|X" r"XX)\b")
SOMEBODYS = re.compile(r"(?<![\w.~}])/(?:home|root|Users|work|mnt|workspace)/")
TRACKER = re.compile(r"(?<!\w)(?:issue|ticket)s? #?\d", re.I)


@pytest.mark.parametrize("pattern", [UNFINISHED, SOMEBODYS, TRACKER], ids=["unfinished", "somebody's path", "tracker"])
def test_nothing_is_left_unfinished_or_speaks_of_where_it_was_made(pattern: re.Pattern[str]) -> None:
    found = []
    for path in SOURCES:
        with contextlib.suppress(UnicodeDecodeError):
            for number, line in enumerate(io.StringIO(path.read_text("utf-8")), 1):
                found += [f"{path.relative_to(ROOT)}:{number}: {line.strip()}"] if pattern.search(line) else []
    assert found == []
