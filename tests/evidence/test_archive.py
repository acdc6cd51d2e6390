"""What is packed comes out again, from one encoding only, and with names that can hurt nobody."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import textwrap
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore import evidence
from ckptstore.errors import MalformedError, NotFoundError, RefusedError, UnsupportedVersionError
from ckptstore.evidence import Manifest, Member, Reference, ustar
from ckptstore.format import canonical
from ckptstore.format.digest import Digest

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = Reference("objects/ab/" + "ab" * 32, 20_536_516_608, Digest.of(b"weights"))
LONG = "/".join(["d" * 50] * 3 + ["f" * 100])

component = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=12).filter(
    lambda text: text not in (".", "..") and len(text.encode()) <= 40
)
paths = st.lists(component, min_size=1, max_size=3).map("/".join).filter(lambda path: path != "MANIFEST.json")


def leaves(names: set[str]) -> list[str]:
    """Those that are no other's folder, as files and folders cannot share a name."""
    kept = [name for name in names if not any(other.startswith(name + "/") for other in names)]
    return [name for name in kept if not name.startswith("MANIFEST.json/")]


@given(names=st.sets(paths, max_size=6), data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_packed_is_verified_and_unpacked_byte_for_byte(
    names: set[str], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("archive")
    members = {name: data.draw(st.binary(max_size=1100)) for name in leaves(names)}
    info = evidence.pack(members, folder / "e.tar", [REFERENCE])
    assert evidence.verify(folder / "e.tar") == info
    assert evidence.faults(folder / "e.tar") == ()
    raw = (folder / "e.tar").read_bytes()
    assert (info.size, info.sha256, info.blake3) == (len(raw), hashlib.sha256(raw).hexdigest(), Digest.of(raw))
    assert [member.path for member in info.members] == sorted(members, key=str.encode)
    assert info.references == (REFERENCE,)
    evidence.unpack(folder / "e.tar", folder / "out")
    found = {str(p.relative_to(folder / "out")): p.read_bytes() for p in (folder / "out").rglob("*") if p.is_file()}
    assert found == members


@given(names=st.sets(paths, max_size=6), data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_tar_library_reads_and_writes_the_same_archive(
    names: set[str], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("archive")
    members = {name: data.draw(st.binary(max_size=600)) for name in leaves(names)}
    evidence.pack(members, folder / "e.tar")
    with tarfile.open(folder / "e.tar") as tar:
        contents = {entry.name: tar.extractfile(entry).read() for entry in tar}  # type: ignore[union-attr]
        manifest = contents.pop("MANIFEST.json")
        assert contents == members
    theirs = io.BytesIO()
    with tarfile.open(fileobj=theirs, mode="w", format=tarfile.USTAR_FORMAT, encoding="utf-8") as tar:
        for name, content in [("MANIFEST.json", manifest), *sorted(members.items(), key=lambda item: item[0].encode())]:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    assert (folder / "e.tar").read_bytes() == theirs.getvalue()


@pytest.mark.parametrize("length", [1, 99, 100, 101, 155, 156, 200, 255, 256])
def test_a_long_path_is_cut_as_every_tar_cuts_it_or_refused(length: int) -> None:
    path = ("d" * 29 + "/") * 8
    path = (path + "f" * length)[-length:].lstrip("/") if length < 240 else path + "f" * (length - len(path))
    parts = ustar.split(path)
    entry = tarfile.TarInfo(path)
    entry.size = 7
    if parts is None:
        with pytest.raises(ValueError, match="too long"):
            entry.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")
    else:
        assert ustar.header(path, 7) == entry.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")


def test_the_manifest_says_what_the_archive_is(tmp_path: Path) -> None:
    evidence.pack({"b": b"2", "a/x": b"1"}, tmp_path / "e.tar", [REFERENCE])
    with tarfile.open(tmp_path / "e.tar") as tar:
        assert tar.getnames() == ["MANIFEST.json", "a/x", "b"]
        document = canonical.decode(tar.extractfile("MANIFEST.json").read(), 10_000)  # type: ignore[union-attr]
    assert isinstance(document, dict)
    assert (document["kind"], document["format"]) == ("evidence", 1)
    assert document["members"] == [
        {"path": path, "size": 1, "sha256": hashlib.sha256(content).hexdigest(), "blake3": str(Digest.of(content))}
        for path, content in (("a/x", b"1"), ("b", b"2"))
    ]
    assert document["references"] == [
        {"key": REFERENCE.key, "size": REFERENCE.size, "digest": str(REFERENCE.digest)},
    ]


class TestTheSameBytesFromAnywhere:
    """B084 (python/cpython#75707, bazelbuild/bazel#1844): identical content must not give another archive."""

    SCRIPT = textwrap.dedent("""
        import os, sys, time
        from pathlib import Path
        mask, order, folder, out, work = sys.argv[1:]
        os.umask(int(mask, 8))
        time.tzset()
        os.chdir(work)
        sys.path.insert(0, os.environ["TREE"])
        from ckptstore import evidence
        names = ["a/one", "a/two", "\\u00fcber", "z"]
        names = names[::-1] if order == "reversed" else names
        for place, name in enumerate(names):
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"content of {name}", "utf-8")
            os.utime(path, (1.5e9 + place, 1.5e9 + place + 0.25))
            os.chmod(path, 0o600 + place)
        members = {name: Path(folder, name) for name in names}
        members["inline"] = b"x" * 5000
        print(evidence.pack(members, out).sha256)
    """)

    def packed(self, tmp_path: Path, name: str, mask: str, order: str, **environment: str) -> tuple[str, bytes]:
        work = tmp_path / f"{name}.work"
        work.mkdir()
        out = tmp_path / f"{name}.tar"
        done = subprocess.run(
            [sys.executable, "-c", self.SCRIPT, mask, order, str(tmp_path / f"{name}.files"), str(out), str(work)],
            env={**os.environ, "TREE": str(ROOT), "TMPDIR": str(work), **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), out.read_bytes()

    def test_time_zone_umask_locale_folder_and_order_leave_no_trace(self, tmp_path: Path) -> None:
        one = self.packed(tmp_path, "one", "077", "sorted", TZ="Asia/Kathmandu", LC_ALL="C", PYTHONHASHSEED="1")
        two = self.packed(
            tmp_path, "two", "022", "reversed", TZ="UTC", LC_ALL="C.UTF-8", PYTHONHASHSEED="2", SOURCE_DATE_EPOCH="1"
        )
        assert one == two
        assert one[0] == hashlib.sha256(one[1]).hexdigest()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
    def test_the_owner_leaves_no_trace(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"content")
        mine = evidence.pack({"file": tmp_path / "file"}, tmp_path / "one.tar")
        os.chown(tmp_path / "file", 12345, 54321)
        assert evidence.pack({"file": tmp_path / "file"}, tmp_path / "two.tar").sha256 == mine.sha256

    def test_bytes_files_and_views_of_one_content_are_one_archive(self, tmp_path: Path) -> None:
        content = b"content" * 300_000
        (tmp_path / "file").write_bytes(content)
        forms = [content, bytearray(content), memoryview(content), tmp_path / "file"]
        infos = [evidence.pack({"x": form}, tmp_path / f"{place}.tar") for place, form in enumerate(forms)]
        assert len({info.sha256 for info in infos}) == 1

    def test_an_archive_of_known_content_has_its_known_digest(self, tmp_path: Path) -> None:
        """Computed by `sha256sum`; another value means that the format changed."""
        info = evidence.pack({"plan.json": b"{}", LONG: b"deep\n"}, tmp_path / "e.tar", [REFERENCE])
        assert info.size == 10_240
        assert info.sha256 == "5acc8a4048b2da1cf24260127e35aef9863f5e902b4016bfd70268cd9a9cedc5"


def test_a_large_member_never_lies_in_memory(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(32 * 2**20)
    tracemalloc.start()
    try:
        evidence.pack({"large": tmp_path / "large"}, tmp_path / "e.tar")
        evidence.unpack(tmp_path / "e.tar", tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 6 * 2**20
    finally:
        tracemalloc.stop()
    assert (tmp_path / "out" / "large").stat().st_size == 32 * 2**20


class TestWhatCannotBePacked:
    @pytest.mark.parametrize(
        "path",
        [
            *("", "/x", "../x", "a/../../x", "a/./b", "a//b", "a/", ".", "..", "a\0b", "\ud800", "MANIFEST.json"),
            *("f" * 101, "/".join(["d" * 100] * 3)),  # longer than ustar holds
        ],
    )
    def test_a_name_that_could_lead_elsewhere_is_refused_by_name(self, path: str, tmp_path: Path) -> None:
        with pytest.raises(RefusedError) as caught:
            evidence.pack({"fine": b"", path: b""}, tmp_path / "e.tar")
        assert ascii(path)[:80] in str(caught.value)
        assert list(tmp_path.iterdir()) == []

    def test_a_file_cannot_be_another_ones_folder(self, tmp_path: Path) -> None:
        for members in ({"a": b"", "a/b": b""}, {"a": b"", "a-": b"", "a/b/c": b""}, {"MANIFEST.json/x": b""}):
            with pytest.raises(RefusedError, match="cannot be its folder"):
                evidence.pack(members, tmp_path / "e.tar")
        assert list(tmp_path.iterdir()) == []

    def test_a_reference_is_named_once(self, tmp_path: Path) -> None:
        with pytest.raises(RefusedError, match="listed twice"):
            evidence.pack({}, tmp_path / "e.tar", [REFERENCE, REFERENCE])

    def test_only_regular_files_are_read(self, tmp_path: Path) -> None:
        (tmp_path / "real").write_bytes(b"x")
        (tmp_path / "link").symlink_to(tmp_path / "real")
        os.mkfifo(tmp_path / "pipe")
        before = sorted(tmp_path.iterdir())
        for source in (tmp_path / "link", tmp_path / "pipe", tmp_path, Path(os.devnull)):
            with pytest.raises(RefusedError):
                evidence.pack({"x": source}, tmp_path / "e.tar")
        with pytest.raises(NotFoundError):
            evidence.pack({"x": tmp_path / "absent"}, tmp_path / "e.tar")
        assert sorted(tmp_path.iterdir()) == before

    def test_a_file_of_more_than_8_gib_is_sent_to_the_references(self, tmp_path: Path) -> None:
        with (tmp_path / "large").open("wb") as file:
            file.truncate(ustar.MAX_SIZE + 1)  # sparse: takes no space
        with pytest.raises(RefusedError, match="reference"):
            evidence.pack({"large": tmp_path / "large"}, tmp_path / "e.tar")

    def test_nothing_is_overwritten(self, tmp_path: Path) -> None:
        (tmp_path / "e.tar").write_bytes(b"mine")
        (tmp_path / "dangling").symlink_to("nowhere")
        for name in ("e.tar", "dangling"):
            with pytest.raises(RefusedError, match="exists already"):
                evidence.pack({"x": b""}, tmp_path / name)
        assert (tmp_path / "e.tar").read_bytes() == b"mine"
        assert not (tmp_path / "nowhere").exists()

    def test_a_missing_folder_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError):
            evidence.pack({"x": b""}, tmp_path / "absent" / "e.tar")


class TestManifest:
    MEMBER = Member("a", 1, "0" * 64, Digest(bytes(32)))

    def test_a_manifest_of_another_version_or_kind_is_refused_as_such(self) -> None:
        data = Manifest((self.MEMBER,)).encode()
        with pytest.raises(UnsupportedVersionError):
            Manifest.parse(data.replace(b'"format":1', b'"format":2'))
        with pytest.raises(MalformedError, match="kind"):
            Manifest.parse(data.replace(b'"kind":"evidence"', b'"kind":"treasure"'))

    def test_members_are_sorted_by_their_utf8_bytes_and_once_each(self) -> None:
        first, second = (Member(path, 1, "0" * 64, Digest(bytes(32))) for path in ("Z", "a"))
        Manifest((first, second))
        for order in ((second, first), (first, first)):
            with pytest.raises(MalformedError):
                Manifest(order)

    @pytest.mark.parametrize("sha256", ["", "0" * 63, "0" * 65, "A" * 64, "0" * 64 + "\n"])
    def test_a_sha256_has_one_form(self, sha256: str) -> None:
        with pytest.raises(MalformedError):
            Member("a", 1, sha256, Digest(bytes(32)))

    @given(st.binary(max_size=200))
    def test_bytes_that_are_no_manifest_raise_only_our_error(self, data: bytes) -> None:
        with pytest.raises(MalformedError):
            Manifest.parse(data)
