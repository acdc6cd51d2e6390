"""Trees: clean relative paths, each file once, and every file of the source in it or left out by name."""

from __future__ import annotations

import pytest

from ckptstore.errors import MalformedError
from ckptstore.format.digest import Digest
from ckptstore.format.tensors import CHUNK
from ckptstore.format.tree import Excluded, File, Preparation, Tree, check_path

CHUNK_DIGEST = Digest.of(b"chunk")


def empty(path: str) -> File:
    return File(path, False, 0, ())


@pytest.mark.parametrize(
    "path", ["a", "a/b", "...", "..a", "a..", "-", " ", "a\nb", "C:\\x", "~", "\u202e", "x" * 4096, "\u00e9/e\u0301"]
)
def test_a_clean_relative_path_is_accepted(path: str) -> None:
    """F-91."""
    tree = Tree((empty(path),))
    assert Tree.parse(tree.encode()) == tree


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/a",
        "a/",
        "a//b",
        ".",
        "..",
        "./a",
        "../a",
        "a/.",
        "a/..",
        "a/./b",
        "a/../b",
        "a\0b",
        "x" * 4097,
        "\u00e9" * 2049,
        "\udcff",
    ],
)
def test_an_unclean_path_is_refused(path: str) -> None:
    """F-91 (B044)."""
    with pytest.raises(MalformedError):
        check_path(path)
    with pytest.raises(MalformedError):
        Tree.parse(Tree((empty(path),)).encode())
    with pytest.raises(MalformedError):
        Tree.parse(Tree((), (Excluded(path, "why"),)).encode())


def test_paths_are_sorted_by_bytes_and_told_once() -> None:
    """F-92."""
    for tree in (Tree((empty("\uffff"), empty("\U00010000"))), Tree((empty("a-b"), empty("a/b"), empty("a0b")))):
        assert Tree.parse(tree.encode()) == tree
    for files in ([empty("b"), empty("a")], [empty("a"), empty("a")], [empty("\U00010000"), empty("\uffff")]):
        with pytest.raises(MalformedError, match="sorted"):
            Tree.parse(Tree(tuple(files)).encode())


@pytest.mark.parametrize(
    ("files", "excluded"),
    [(["a", "a/b"], []), (["a", "a/b/c"], []), (["a"], ["a"]), (["a"], ["a/b"]), (["a/b"], ["a"]), ([], ["a", "a/b"])],
)
def test_no_path_is_two_things(files: list[str], excluded: list[str]) -> None:
    """F-92."""
    tree = Tree(tuple(map(empty, files)), tuple(Excluded(path, "why") for path in excluded))
    with pytest.raises(MalformedError):
        Tree.parse(tree.encode())


@pytest.mark.parametrize(("size", "chunks"), [(0, 0), (1, 1), (CHUNK, 1), (CHUNK + 1, 2), (5 * CHUNK, 5)])
def test_a_file_has_the_chunks_of_its_size(size: int, chunks: int) -> None:
    """F-93."""
    tree = Tree((File("a", True, size, (CHUNK_DIGEST,) * chunks),))
    assert Tree.parse(tree.encode()) == tree
    assert len(tree.files[0].lengths()) == chunks
    for wrong in {chunks - 1, chunks + 1} - {-1}:
        with pytest.raises(MalformedError, match="chunks"):
            Tree.parse(Tree((File("a", True, size, (CHUNK_DIGEST,) * wrong),)).encode())


def test_mode_and_link_of_a_file_are_part_of_the_tree() -> None:
    """F-90, F-95."""
    files = [File("a", executable, 0, (), link) for executable in (False, True) for link in (None, "b", "../b")]
    digests = {Digest.of(Tree((file,)).encode()) for file in files}
    assert len(digests) == len(files)


def test_what_is_left_out_is_part_of_the_tree() -> None:
    """F-96."""
    trees = [
        Tree(()),
        Tree((), (Excluded("a", "x"),)),
        Tree((), (Excluded("a", "y"),)),
        Tree((), (Excluded("b", "x"),)),
    ]
    assert len({Digest.of(tree.encode()) for tree in trees}) == len(trees)
    with pytest.raises(MalformedError):
        Tree.parse(Tree((), (Excluded("a", ""),)).encode())


def test_plan_inputs_and_sources_are_not_interchangeable() -> None:
    """F-98."""
    a, b, c = (Digest.of(name) for name in (b"a", b"b", b"c"))
    identities = {Digest.of(Preparation(*order).encode()) for order in ((a, b, c), (b, a, c), (a, c, b), (a, a, a))}
    assert len(identities) == 4
