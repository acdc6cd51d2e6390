"""Folders of files: every file is taken or excluded by name, and what was staged is checked (faults B065, B088,
B089)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptstore
from ckptstore.errors import BackendError, CorruptError, MalformedError, RefusedError
from ckptstore.format.tree import File, Tree
from ckptstore.store import Store
from tests.support.claims import dead


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """B089 (ray-project/ray#62121): file kinds that a list of name patterns would not know."""
    folder = tmp_path / "tokenizer"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates" / "x.jinja").write_text("x")
    (folder / "foo.bar").write_bytes(b"\x00\x01")
    (folder / "empty").write_bytes(b"")
    (folder / ".hidden").write_text("dot")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link.json").symlink_to("tokenizer.json")
    return folder


def test_every_file_is_in_the_tree_whatever_its_name(store: Store, tokenizer: Path, tmp_path: Path) -> None:
    digest = store.put_tree(tokenizer)
    files = {file.path: file for file in store.tree(digest).files}
    names = (
        "additional_chat_templates/x.jinja chat_template.jinja empty foo.bar link.json run.sh tokenizer.json .hidden"
    )
    assert sorted(files) == sorted(names.split())
    assert files["link.json"].link == "tokenizer.json"
    assert files["run.sh"].executable
    out = tmp_path / "out"
    assert store.get_tree(digest, out) == sum(file.size for file in files.values())
    assert (out / "link.json").read_text() == "{}"
    assert not (out / "link.json").is_symlink()
    assert os.access(out / "run.sh", os.X_OK)
    assert store.put_tree(tokenizer) == digest


def test_what_is_left_out_is_left_out_by_name_with_a_reason(store: Store, tokenizer: Path) -> None:
    tree = store.tree(store.put_tree(tokenizer, {"foo.bar": "scratch file"}))
    assert [(item.path, item.reason) for item in tree.excluded] == [("foo.bar", "scratch file")]
    assert "foo.bar" not in {file.path for file in tree.files}
    with pytest.raises(RefusedError, match="excluded but not there: nothing"):
        store.put_tree(tokenizer, {"nothing": "typo"})


@pytest.mark.parametrize("kind", ["fifo", "outside", "dangling"])
def test_other_kinds_are_refused_by_name(store: Store, tokenizer: Path, tmp_path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(tokenizer / "odd")
    elif kind == "outside":
        (tmp_path / "secret").write_text("secret")
        (tokenizer / "odd").symlink_to(tmp_path / "secret")
    else:
        (tokenizer / "odd").symlink_to("nowhere")
    with pytest.raises(RefusedError, match="odd"):
        store.put_tree(tokenizer)


def test_a_missing_required_file_is_named_with_its_role_before_anything_runs(store: Store, tokenizer: Path) -> None:
    """B089: the template is there when the tree is made, and left behind by the staging."""
    tree = store.tree(store.put_tree(tokenizer))
    wanted = {"chat_template.jinja": "chat template", "tokenizer.json": "tokenizer"}
    ckptstore.check_files(tokenizer, tree, wanted)
    (tokenizer / "chat_template.jinja").unlink()
    with pytest.raises(RefusedError, match=r"chat_template\.jinja \(chat template\) is missing"):
        ckptstore.check_files(tokenizer, tree, wanted)


@pytest.mark.parametrize("change", ["bytes", "longer", "mode", "link"])
def test_a_changed_file_is_named(store: Store, tokenizer: Path, change: str) -> None:
    """B088 (sigstore/model-transparency#374): also one swapped for a link to identical content."""
    tree = store.tree(store.put_tree(tokenizer))
    target = tokenizer / "tokenizer.json"
    if change == "bytes":
        target.write_text("[]")
    elif change == "longer":
        target.write_text("{} ")
    elif change == "mode":
        target.chmod(0o755)
    else:
        target.rename(tokenizer / "copy.json")
        target.symlink_to("copy.json")
    with pytest.raises(RefusedError, match=r"tokenizer\.json \(tokenizer\) is not the file"):
        ckptstore.check_files(tokenizer, tree, {"tokenizer.json": "tokenizer"})


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "a//b", ".", "a/.", "a\x00"])
def test_a_tree_that_leads_outside_is_no_tree(store: Store, path: str) -> None:
    """B088: refused when it is read, before any file is opened."""
    from ckptstore.format.tree import File

    digest = store.objects.put_document(Tree((File(path, False, 0, ()),)).encode())
    with pytest.raises(MalformedError, match="relative path"):
        store.tree(digest)


def test_checkout_never_follows_a_link_or_overwrites(store: Store, tokenizer: Path, tmp_path: Path) -> None:
    digest = store.put_tree(tokenizer)
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "victim").write_text("mine")
    (out / "foo.bar").symlink_to(tmp_path / "victim")
    with pytest.raises(RefusedError, match=r"foo\.bar"):
        store.get_tree(digest, out)
    assert (tmp_path / "victim").read_text() == "mine"


def test_what_a_dead_writer_left_goes_also_where_every_file_is_there(
    store: Store, tokenizer: Path, tmp_path: Path
) -> None:
    """It may have died when its file had got its name, and before its temporary was gone."""
    digest = store.put_tree(tokenizer)
    out = tmp_path / "out"
    out.mkdir()
    store.get_tree(digest, out)
    left = out / f".{dead()}.{'0' * 32}.tmp"
    left.write_bytes(b"half")
    assert store.get_tree(digest, out, []) == 0
    assert not left.exists()


def test_editing_a_checked_out_file_does_not_touch_the_store(
    disk_store: Store, tokenizer: Path, tmp_path: Path
) -> None:
    """B065 (treeverse/dvc#1599)."""
    digest = disk_store.put_tree(tokenizer)
    disk_store.get_tree(digest, tmp_path / "out")
    with (tmp_path / "out" / "tokenizer.json").open("ab") as stream:
        stream.write(b"!")
    disk_store.get_tree(digest, tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == b"{}"
    with pytest.raises(RefusedError, match=r"tokenizer\.json"):
        ckptstore.check_files(tmp_path / "out", disk_store.tree(digest), {"tokenizer.json": "tokenizer"})


def test_a_damaged_file_of_a_tree_is_never_written_out(disk_store: Store, tokenizer: Path, tmp_path: Path) -> None:
    digest = disk_store.put_tree(tokenizer)
    file = next(file for file in disk_store.tree(digest).files if file.path == "chat_template.jinja")
    path = Path(disk_store.url.removeprefix("file://")) / f"objects/{file.chunks[0].hex[:2]}/{file.chunks[0].hex}"
    path.chmod(0o644)
    path.write_bytes(b"{{ massages }}")
    with pytest.raises(CorruptError, match=r"chat_template\.jinja"):
        ckptstore.open(disk_store.url).get_tree(digest, tmp_path / "out")
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_a_file_name_that_is_no_text_is_refused_by_name(store: Store, tokenizer: Path) -> None:
    Path(os.fsdecode(os.fsencode(tokenizer) + b"/odd-\xff")).write_text("x")
    with pytest.raises(RefusedError, match="odd-"):
        store.put_tree(tokenizer)


@pytest.mark.parametrize("kind", ["circle", "dangling", "out", "folder"])
def test_a_link_to_no_file_of_the_folder_is_refused(store: Store, tokenizer: Path, kind: str) -> None:
    """F-95."""
    target = {"circle": "other", "dangling": "nowhere", "out": "/etc/passwd", "folder": "additional_chat_templates"}
    (tokenizer / "bad").symlink_to(target[kind])
    (tokenizer / "other").symlink_to("bad")
    with pytest.raises(RefusedError, match=r"bad|other"):
        store.put_tree(tokenizer)


@pytest.mark.parametrize("kind", ["link", "file", "folder"])
def test_checkout_does_not_go_through_what_lies_in_its_way(
    store: Store, tokenizer: Path, tmp_path: Path, kind: str
) -> None:
    """F-97: not even through a link to a folder, which would lead it out of the one that it was given."""
    tree = store.put_tree(tokenizer)
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    if kind == "link":
        (out / "additional_chat_templates").symlink_to(elsewhere)
    elif kind == "file":
        (out / "additional_chat_templates").write_bytes(b"")
    else:
        (out / "additional_chat_templates" / "x.jinja").mkdir(parents=True)
    with pytest.raises(RefusedError, match="additional_chat_templates"):
        store.get_tree(tree, out)
    assert list(elsewhere.iterdir()) == []
    (tmp_path / "link").symlink_to(elsewhere)  # the folder itself may be a link: that is what it was given
    store.get_tree(tree, tmp_path / "link")
    assert store.put_tree(elsewhere) != tree  # the link among the files came back as a file
    assert (elsewhere / "additional_chat_templates" / "x.jinja").read_text() == "x"


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A folder that may become deeper than Python may call itself, which is how pytest would remove it."""
    yield tmp_path / "out"
    subprocess.run(["rm", "-rf", tmp_path / "out"], check=True)


def test_folders_may_lie_as_deep_as_a_path_can_name_them(store: Store, out: Path) -> None:
    """Deeper than Python may call itself."""
    chunk = store.objects.put_object(b"deep")
    deep = "d/" * 1200 + "file"
    tree = store.objects.put_document(Tree((File(deep, False, 4, (chunk,)),)).encode())
    store.get_tree(tree, out)
    assert (out / deep).read_bytes() == b"deep"
    assert store.put_tree(out) == tree


@pytest.mark.parametrize("path", ["f" * 300, "d/" * 2000 + "file"], ids=["name", "path"])
def test_a_path_that_this_system_cannot_have_is_an_error_of_ours(store: Store, out: Path, path: str) -> None:
    tree = store.objects.put_document(Tree((File(path, False, 0, ()),)).encode())
    with pytest.raises(BackendError, match="ENAMETOOLONG"):
        store.get_tree(tree, out)
