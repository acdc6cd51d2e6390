"""Who may import whom, read from the sources: the rooms of CONTRIBUTING.md, and what may be nowhere."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The rooms that read or write live tensors and torch's own state.
LIVE = ("ckptstore.live",)

# Heavy third-party modules, and the only rooms that may import each (a module, or a package with all below it).
OWNERS: dict[str, tuple[str, ...]] = {
    "torch": (*LIVE, "trainer"),
    # The worker seeds all the generators that a checkpoint holds.
    "numpy": ("ckptstore.diff.numeric", *LIVE, "trainer.workers.session", "trainer.starting.dequantise"),
    "sqlalchemy": ("ckptstore.catalogue",),
    "boto3": ("ckptstore.backends.s3", "trainer.lifecycle.s3client"),
    "botocore": ("ckptstore.backends.s3", "trainer.lifecycle.s3client"),
    "tenacity": ("ckptstore.backends.s3",),
    "urllib3": ("ckptstore.backends.s3",),
    "click": ("cli",),
    "rich": ("cli",),
}

# A format that needs no clock, no files, no chance and no tensors can be read by anyone, in any language, and replayed.
IMPURE = frozenset(
    {"datetime", "glob", "io", "logging", "mmap", "numpy", "os", "pathlib", "random", "secrets", "shutil", "socket"}
    | {"sqlite3", "subprocess", "tempfile", "threading", "time", "torch", "urllib"}
)

# What each inner room may import of ckptstore; a name ending in a dot stands for everything below it.
INSIDE: dict[str, tuple[str, ...]] = {
    "ckptstore.errors": (),
    "ckptstore.format": ("ckptstore.errors", "ckptstore.format", "ckptstore.format."),
    "ckptstore.backends": ("ckptstore.errors", "ckptstore.backends", "ckptstore.backends."),
    "ckptstore.evidence": (
        "ckptstore.errors",
        "ckptstore.format",
        "ckptstore.format.",
        "ckptstore.evidence",
        "ckptstore.evidence.",
        "ckptstore.outside",
    ),
    "ckptstore.outside": ("ckptstore.errors", "ckptstore.format", "ckptstore.format."),
    "ckptstore.diff.numeric": ("ckptstore.errors", "ckptstore.format", "ckptstore.format."),
}

# The face that the leaves (cli, trainer) see.
PUBLIC = (
    "ckptstore",
    "ckptstore.errors",
    "ckptstore.evidence",
    "ckptstore.evidence.",
    "ckptstore.format",
    "ckptstore.format.",
)

# Modules that turn bytes into behaviour.
UNSAFE_MODULES = frozenset(
    {"_pickle", "cloudpickle", "code", "dill", "joblib", "jsonpickle", "marshal", "pickle", "pickletools", "runpy"}
    | {"shelve", "xmlrpc", "zipimport"}
)
UNSAFE_BUILTINS = frozenset({"__import__", "compile", "eval", "exec"})
UNSAFE_CALLS = frozenset(
    {"torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "numpy.load", "np.load", "pandas.read_pickle"}
    | {f"yaml.{name}" for name in ("load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all")}
    # these pickle what they send
    | {
        f"dist.{name}"
        for name in ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
    }
    | {f"dist.{name}" for name in ("send_object_list", "recv_object_list")}
)


@dataclass(frozen=True)
class Import:
    """One imported module; ``name`` is what was taken out of it, None for ``import module``."""

    module: str
    name: str | None
    line: int
    for_types_only: bool


@dataclass(frozen=True)
class Source:
    module: str
    path: Path
    tree: ast.Module

    def at(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"


@cache
def sources() -> tuple[Source, ...]:
    found = []
    for room in ("ckptstore", "cli", "trainer"):
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Source(module, path, ast.parse(path.read_bytes(), str(path))))
    return tuple(found)


def imports(source: Source) -> Iterator[Import]:
    """Every import, also those inside functions; modules of ``from . import x`` are made absolute."""
    typed = {
        id(node)
        for block in ast.walk(source.tree)
        if isinstance(block, ast.If) and dotted(block.test).removeprefix("typing.") == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    package = source.module if source.path.name == "__init__.py" else source.module.rpartition(".")[0]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, node.lineno, id(node) in typed)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                yield Import(base, alias.name, node.lineno, id(node) in typed)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def allowed(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or (name.endswith(".") and module.startswith(name)) for name in names)


def reached(found: Import) -> tuple[str, ...]:
    """The modules that an import may load: ``from a import b`` loads a, and a.b where that is a module of ours."""
    if found.name is None:
        return (found.module,)
    inner = f"{found.module}.{found.name}"
    modules = {source.module for source in sources()}
    # Taking modules out of the package is not using its face, so only what is reached counts.
    return (inner,) if inner in modules else (found.module,)


@pytest.mark.parametrize("library", sorted(OWNERS))
def test_a_heavy_library_is_imported_only_in_the_rooms_that_own_it(library: str) -> None:
    wrong = [
        source.at(found.line)
        for source in sources()
        if not within(source.module, OWNERS[library])
        for found in imports(source)
        if found.module.split(".")[0] == library and not found.for_types_only
    ]
    assert wrong == []


def test_the_format_is_pure() -> None:
    wrong = []
    for source in sources():
        if not within(source.module, ("ckptstore.format",)):
            continue
        wrong += [source.at(found.line) for found in imports(source) if found.module.split(".")[0] in IMPURE]
        wrong += [
            source.at(node.lineno)
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("open", "print", "input")
        ]
    assert wrong == []


@pytest.mark.parametrize("room", sorted(INSIDE))
def test_an_inner_room_imports_only_what_is_further_in(room: str) -> None:
    wrong = [
        f"{source.at(found.line)} imports {module}"
        for source in sources()
        if within(source.module, (room,))
        for found in imports(source)
        for module in reached(found)
        if module.split(".")[0] == "ckptstore" and not allowed(module, INSIDE[room])
    ]
    assert wrong == []


def test_nobody_imports_the_leaves() -> None:
    leaves = {"cli": "cli", "ckptstore_cli": "cli", "trainer": "trainer"}
    wrong = [
        f"{source.at(found.line)} imports {found.module}"
        for source in sources()
        for found in imports(source)
        if leaves.get(found.module.split(".")[0], source.module.split(".")[0]) != source.module.split(".")[0]
    ]
    assert wrong == []


def test_the_command_line_imports_itself_relatively() -> None:
    """Its folder and its installed package have different names; relative imports hold under both, also for mypy."""
    wrong = [
        source.at(node.lineno)
        for source in sources()
        if source.module.split(".")[0] == "cli"
        for node in ast.walk(source.tree)
        if (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").split(".")[0] in ("cli", "ckptstore_cli")
        )
        or (
            isinstance(node, ast.Import)
            and any(name.name.split(".")[0] in ("cli", "ckptstore_cli") for name in node.names)
        )
    ]
    assert wrong == []


def test_the_leaves_use_only_public_names() -> None:
    modules = {source.module for source in sources()}
    wrong = []
    for source in sources():
        if source.module.split(".")[0] not in ("cli", "trainer"):
            continue
        for found in imports(source):
            if found.module.split(".")[0] != "ckptstore":
                continue
            for module in reached(found):
                if not allowed(module, PUBLIC):
                    wrong.append(f"{source.at(found.line)} imports {module}")
            if any(private(part) for part in (*found.module.split("."), found.name or "")):
                wrong.append(f"{source.at(found.line)} takes {found.module}.{found.name}")
        for node in ast.walk(source.tree):
            name = dotted(node) if isinstance(node, ast.Attribute) else ""
            if not name.startswith("ckptstore."):
                continue
            if (name in modules and not allowed(name, PUBLIC)) or any(private(part) for part in name.split(".")):
                wrong.append(f"{source.at(node.lineno)} uses {name}")
    assert wrong == []


def test_nothing_unpickles_or_evaluates() -> None:
    """B047: a side file that is unpickled runs its author's code, so no module of the product can do it."""
    assert [where for source in sources() for where in unsafe(source)] == []


def unsafe(source: Source) -> list[str]:
    """Every place in a source that could run what it reads."""
    wrong = [
        f"{source.at(found.line)} imports {found.module}"
        for found in imports(source)
        if found.module.split(".")[0] in UNSAFE_MODULES or f"{found.module}.{found.name}" in UNSAFE_CALLS
    ]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            # torch.distributed goes by its full name or by the short one that everybody gives it
            loaders = {dotted(keyword.value).rpartition(".")[2] for keyword in node.keywords}
            if name == "yaml.load" and loaders & {"BaseLoader", "SafeLoader", "CSafeLoader"}:
                continue  # these make texts, numbers, lists and dicts, and nothing else
            if name in UNSAFE_BUILTINS or name.replace("torch.distributed.", "dist.") in UNSAFE_CALLS:
                wrong.append(f"{source.at(node.lineno)} calls {name}")
    return wrong


# Modules that make much of little, or have an idea of their own of where a file ends.
DECOMPRESSORS = frozenset(
    {"_compression", "brotli", "bz2", "compression", "gzip", "lz4", "lzma", "pyzstd", "snappy", "tarfile", "zipfile"}
    | {"zstandard", "zstd"}
)


def test_nothing_is_decompressed_on_a_read_path() -> None:
    """B091, B092: frames that follow one another, are skipped, are empty or say no size do not occur in format 1, whose
    `encoded/` is reserved. Whoever adds a codec adds its target to tests/fuzz with them."""
    wrong = []
    for source in sources():
        for found in imports(source):
            if found.module.split(".")[0] in DECOMPRESSORS or (found.module == "zlib" and found.name is not None):
                wrong.append(f"{source.at(found.line)} imports {found.module}")
        for node in ast.walk(source.tree):
            name = dotted(node) if isinstance(node, ast.Attribute) else ""
            if name.startswith("zlib.") and name not in ("zlib.crc32", "zlib.adler32"):
                wrong.append(f"{source.at(node.lineno)} uses {name}")
    assert wrong == []


@pytest.mark.parametrize(
    "text", ["import pickle", "from torch import load", "import numpy as np\nnp.load('a')", "eval('1')", "yaml.load(a)"]
)
def test_what_runs_code_is_seen_wherever_it_stands(text: str) -> None:
    """B047: the scan above is not blind."""
    source = Source(
        "ckptstore.x", ROOT / "ckptstore" / "x.py", ast.parse(f"def f():\n    {text.replace(chr(10), '; ')}")
    )
    assert unsafe(source) != []


def loaded_after(statement: str, names: list[str]) -> list[str]:
    """Which of the named modules a fresh process has loaded after ``statement``."""
    script = f"import sys; {statement}; print(*(name for name in {names} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_library_is_light() -> None:
    """So that `ckpt log` starts fast."""
    heavy = ["torch", "numpy", "sqlalchemy", "boto3", "botocore", "click", "rich", "trainer", "ckptstore_cli"]
    assert loaded_after("import ckptstore", heavy) == []


def test_verifying_moving_and_comparing_need_no_torch() -> None:
    """An auditor's machine has none."""
    names = "catalogue commits.concluding diff evidence export opening readbacks.durability store transfers.plan"
    modules = [f"ckptstore.{name}" for name in (*names.split(), "trees", "verify")]
    assert loaded_after(f"import {', '.join(modules)}", ["torch"]) == []


@pytest.mark.parametrize(
    ("module", "text", "line"),
    [
        ("ckptstore.store", "import torch", 1),
        ("ckptstore.store", "def f():\n    from numpy import array", 2),
        ("ckptstore.evidence.archive", "from ..backends import protocol", 1),
    ],
)
def test_an_import_is_seen_wherever_it_stands(module: str, text: str, line: int) -> None:
    source = Source(module, ROOT / "ckptstore" / "x.py", ast.parse(text))
    (found,) = imports(source)
    assert found.line == line
    assert found.module in ("torch", "numpy", "ckptstore.backends")
    assert not found.for_types_only


def test_an_import_for_types_only_loads_nothing() -> None:
    source = Source(
        "ckptstore.x", ROOT / "x.py", ast.parse("if TYPE_CHECKING:\n    import torch\nelse:\n    import numpy")
    )
    assert [(found.module, found.for_types_only) for found in imports(source)] == [("torch", True), ("numpy", False)]


def test_without_torch_saving_says_what_to_install(tmp_path: Path) -> None:
    """Where torch is missing, `import torch` fails as it does here."""
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import ckptstore\n"
        "try:\n"
        "    ckptstore.open(sys.argv[1], create=True).run('main')\n"
        "except ckptstore.errors.UsageError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "s")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "torch is not installed (pip install 'ckptstore[torch]'" in done.stdout
