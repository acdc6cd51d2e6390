"""An archive is, byte for byte, the archive of its manifest; anything else is refused, and nothing of it unpacked."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore import evidence
from ckptstore.errors import CkptStoreError, CorruptError, MalformedError, NotFoundError, RefusedError
from ckptstore.evidence import Manifest, Member, Reference, ustar
from ckptstore.format.digest import Digest

MEMBERS = {"a/one": b"1" * 700, "b": b"", "c": b"three", "d": b"4" * 512}
REFERENCES = (Reference("objects/ab/" + "ab" * 32, 10, Digest.of(b"weights")),)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "e.tar"
    evidence.pack(MEMBERS, path, REFERENCES)
    return path.read_bytes()


@pytest.fixture
def refused(tmp_path: Path) -> Callable[[bytes], CkptStoreError]:
    """Verifies and unpacks the given bytes; both must refuse them as corrupt or malformed, and leave nothing behind."""
    calls = 0

    def refuse(data: bytes) -> CkptStoreError:
        nonlocal calls
        calls += 1
        path, out = tmp_path / f"{calls}.tar", tmp_path / f"{calls}.out"
        path.write_bytes(data)
        with pytest.raises((CorruptError, MalformedError)) as caught:
            evidence.verify(path)
        assert str(path) in str(caught.value)
        with pytest.raises(type(caught.value)):
            evidence.unpack(path, out)
        assert not out.exists()
        path.unlink()
        return caught.value

    return refuse


def places(data: bytes) -> dict[str, int]:
    """Where each member's header begins, found by a tar library."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {entry.name: entry.offset for entry in tar}


Refuse = Callable[[bytes], CkptStoreError]


class TestTornArchives:
    """B085 (python/cpython#120740, BobBuildTool/bob#636): a damaged archive must not open with fewer members."""

    def test_a_cut_at_any_block_is_refused(self, whole: bytes, refused: Refuse) -> None:
        for length in range(0, len(whole), 512):
            refused(whole[:length])

    def test_a_cut_inside_a_block_is_refused(self, whole: bytes, refused: Refuse) -> None:
        for length in (1, 511, 513, 1023, len(whole) - 1, len(whole) - 511, places(whole)["d"] + 600):
            refused(whole[:length])

    def test_members_that_are_cut_off_are_all_named(self, whole: bytes, refused: Refuse) -> None:
        error = str(refused(whole[: places(whole)["c"]]))
        assert "'c': cut off" in error
        assert "'d': cut off" in error
        assert "'b'" not in error

    def test_a_tar_library_would_have_opened_the_cut_archive(self, whole: bytes) -> None:
        with tarfile.open(fileobj=io.BytesIO(whole[: places(whole)["c"]])) as tar:
            assert tar.getnames() == ["MANIFEST.json", "a/one", "b"]

    @pytest.mark.parametrize("name", ["MANIFEST.json", *MEMBERS])
    def test_a_flipped_checksum_byte_is_refused_by_name(self, name: str, whole: bytes, refused: Refuse) -> None:
        for place in range(148, 156):
            data = bytearray(whole)
            data[places(whole)[name] + place] ^= 1
            error = str(refused(bytes(data)))
            assert f"'{name}': its header differs: checksum is" in error

    def test_a_duplicated_member_is_refused(self, whole: bytes, refused: Refuse) -> None:
        at = places(whole)
        for start, end in ((at["b"], at["c"]), (at["c"], at["d"]), (at["a/one"], at["b"])):
            refused(whole[:end] + whole[start:end] + whole[end:])
            refused(whole[:end] + whole[start:end] + whole[end : start - end])  # with the length kept

    def test_a_dropped_member_is_refused(self, whole: bytes, refused: Refuse) -> None:
        at = places(whole)
        refused(whole[: at["b"]] + whole[at["c"] :])

    def test_swapped_members_are_refused(self, whole: bytes, refused: Refuse) -> None:
        at = places(whole)
        data = whole[: at["c"]] + whole[at["d"] : at["d"] + 1024] + whole[at["c"] : at["d"]] + whole[at["d"] + 1024 :]
        assert len(data) == len(whole)
        error = str(refused(data))
        assert "'c'" in error
        assert "'d'" in error

    def test_dropped_end_blocks_are_refused(self, whole: bytes, refused: Refuse) -> None:
        end = places(whole)["d"] + 1024
        for kept in (0, 512, 1024):
            assert "end of the archive" in str(refused(whole[: end + kept]))

    @pytest.mark.parametrize("junk", [b"\0", b"x", bytes(512), bytes(10_240), b"junk" * 300])
    def test_bytes_after_the_end_are_refused(self, junk: bytes, whole: bytes, refused: Refuse) -> None:
        assert f"{len(junk)} bytes follow the end" in str(refused(whole + junk))

    def test_a_second_archive_after_the_first_is_refused(self, whole: bytes, refused: Refuse) -> None:
        refused(whole + whole)
        refused(whole[: places(whole)["d"] + 1024] + whole)

    def test_junk_in_the_end_blocks_is_refused(self, whole: bytes, refused: Refuse) -> None:
        for place in (places(whole)["d"] + 1024, len(whole) - 1):
            data = bytearray(whole)
            data[place] = 1
            assert "last blocks are not zero" in str(refused(bytes(data)))

    def test_junk_in_the_padding_of_a_member_is_refused_by_name(self, whole: bytes, refused: Refuse) -> None:
        data = bytearray(whole)
        data[places(whole)["c"] + 512 + 5] = 1
        assert "'c': the padding after it is not zero" in str(refused(bytes(data)))

    def test_all_faults_are_listed_and_not_only_the_first(self, whole: bytes, refused: Refuse, tmp_path: Path) -> None:
        data, at = bytearray(whole), places(whole)
        data[at["a/one"] + 512] ^= 1
        data[at["c"]] ^= 1
        data[at["d"] + 512 + 511] ^= 1
        error = str(refused(bytes(data)))
        for expected in (
            "'a/one': its content has b3:",
            "'c': its header differs: name is",
            "'d': its content has b3:",
        ):
            assert expected in error
        (tmp_path / "e.tar").write_bytes(data)
        assert [fault.member for fault in evidence.faults(tmp_path / "e.tar")] == ["a/one", "a/one", "c", "d", "d"]

    @given(place=st.integers(0, 10_239), bit=st.integers(0, 7))
    @settings(max_examples=400, deadline=None)
    def test_any_flipped_bit_is_refused(
        self, place: int, bit: int, whole: bytes, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        assert len(whole) == 10_240
        data = bytearray(whole)
        data[place] ^= 1 << bit
        path = tmp_path_factory.mktemp("flip") / "e.tar"
        path.write_bytes(data)
        with pytest.raises((CorruptError, MalformedError)):
            evidence.verify(path)

    @pytest.mark.deep
    def test_each_flipped_byte_of_a_whole_archive_is_refused(self, whole: bytes, tmp_path: Path) -> None:
        path = tmp_path / "e.tar"
        for place in range(len(whole)):
            for mask in (0x01, 0x20, 0x80, 0xFF):
                data = bytearray(whole)
                data[place] ^= mask
                path.write_bytes(data)
                with pytest.raises((CorruptError, MalformedError)):
                    evidence.verify(path)

    @given(data=st.binary(max_size=2000))
    @settings(max_examples=100, deadline=None)
    def test_bytes_of_any_kind_raise_only_our_errors(
        self, data: bytes, whole: bytes, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        folder = tmp_path_factory.mktemp("any")
        for place, raw in enumerate((data, whole[:512] + data, whole[:-1000] + data)):
            (folder / f"{place}.tar").write_bytes(raw)
            with pytest.raises((CorruptError, MalformedError)):
                evidence.verify(folder / f"{place}.tar")

    def test_an_announced_manifest_beyond_the_limit_is_refused_unread(self, refused: Refuse) -> None:
        assert "more than a manifest may" in str(refused(ustar.header("MANIFEST.json", 2**33 - 1) + bytes(10_240)))


class TestHostileArchives:
    """B086 (python/cpython#135034, #149486, #151558): links and devices got around every extraction filter."""

    KINDS: ClassVar[dict[str, tuple[bytes, str, int]]] = {
        "symlink out": (tarfile.SYMTYPE, "../../outside", 0o644),
        "symlink with an empty name": (tarfile.SYMTYPE, "", 0o644),
        "hard link": (tarfile.LNKTYPE, "c", 0o644),
        "hard link to a link": (tarfile.LNKTYPE, "a/one", 0o644),
        "character device": (tarfile.CHRTYPE, "", 0o644),
        "block device": (tarfile.BLKTYPE, "", 0o644),
        "pipe": (tarfile.FIFOTYPE, "", 0o644),
        "folder": (tarfile.DIRTYPE, "", 0o755),
        "contiguous file": (tarfile.CONTTYPE, "", 0o644),
        "old regular file": (tarfile.AREGTYPE, "", 0o644),
        "sparse file": (tarfile.GNUTYPE_SPARSE, "", 0o644),
        "pax header": (tarfile.XHDTYPE, "", 0o644),
        "setuid": (tarfile.REGTYPE, "", 0o4755),
        "setgid": (tarfile.REGTYPE, "", 0o2755),
        "world writable": (tarfile.REGTYPE, "", 0o666),
        "executable": (tarfile.REGTYPE, "", 0o755),
    }

    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_a_member_that_is_no_plain_file_is_refused(self, kind: str, whole: bytes, refused: Refuse) -> None:
        """Its name, size and digests are in the manifest, so only its header gives it away."""
        flavour, link, mode = self.KINDS[kind]
        entry = tarfile.TarInfo("b")
        entry.type, entry.linkname, entry.mode = flavour, link, mode
        at = places(whole)["b"]
        error = str(refused(whole[:at] + entry.tobuf(tarfile.USTAR_FORMAT) + whole[at + 512 :]))
        assert "'b': its header differs" in error
        assert ("type is" in error) == (flavour != tarfile.REGTYPE)

    @pytest.mark.parametrize(
        ("field", "value"),
        [("uid", 1), ("gid", 1), ("mtime", 1), ("uname", "root"), ("gname", "root"), ("name", "./b")],
    )
    def test_metadata_of_any_kind_are_refused(self, field: str, value: object, whole: bytes, refused: Refuse) -> None:
        entry = tarfile.TarInfo("b")
        setattr(entry, field, value)
        at = places(whole)["b"]
        assert "'b'" in str(refused(whole[:at] + entry.tobuf(tarfile.USTAR_FORMAT) + whole[at + 512 :]))

    @pytest.mark.parametrize(
        "extra", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.XHDTYPE, tarfile.REGTYPE]
    )
    def test_a_member_that_is_not_in_the_manifest_is_refused(self, extra: bytes, whole: bytes, refused: Refuse) -> None:
        entry = tarfile.TarInfo("extra")
        entry.type, entry.linkname = extra, "/etc/passwd" if extra in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
        block = entry.tobuf(tarfile.USTAR_FORMAT)
        for at in (0, places(whole)["a/one"], places(whole)["c"], places(whole)["d"] + 1024):
            refused(whole[:at] + block + whole[at:])
            refused(whole[:at] + block + whole[at:-512])

    @pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "./x", "a//x", "x/", "", "MANIFEST.json", "f" * 101])
    def test_a_hostile_path_in_a_consistent_manifest_is_refused(self, path: str, refused: Refuse) -> None:
        """The manifest lists it, sealed and all: made by somebody who knows the format."""
        harmless = "x" * max(1, len(path))
        manifest = Manifest((Member(harmless[:100], 0, "0" * 64, Digest(bytes(32))),))
        member = manifest.members[0]
        object.__setattr__(member, "path", path)
        data = manifest.encode()
        entry = tarfile.TarInfo(path or "x")
        archive = ustar.header("MANIFEST.json", len(data)) + data + bytes(ustar.padding(len(data)))
        archive += entry.tobuf(tarfile.GNU_FORMAT)
        error = refused(archive + bytes(ustar.ending(len(archive))))
        assert isinstance(error, MalformedError)

    def test_a_file_that_is_anothers_folder_is_refused(self, refused: Refuse) -> None:
        members = [Member(path, 0, "0" * 64, Digest(bytes(32))) for path in ("aa", "b/c")]
        manifest = Manifest(tuple(members))
        object.__setattr__(members[0], "path", "b")
        data = manifest.encode()
        archive = ustar.header("MANIFEST.json", len(data)) + data + bytes(ustar.padding(len(data)))
        archive += ustar.header("b", 0) + ustar.header("b/c", 0)
        error = refused(archive + bytes(ustar.ending(len(archive))))
        assert "cannot be its folder" in str(error)


class TestUnpackingIntoAHostileFolder:
    @pytest.fixture
    def archive(self, whole: bytes, tmp_path: Path) -> Path:
        (tmp_path / "e.tar").write_bytes(whole)
        return tmp_path / "e.tar"

    def test_an_existing_file_is_not_overwritten_and_nothing_else_is_written(
        self, archive: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        out.mkdir()
        (out / "d").write_bytes(b"mine")
        with pytest.raises(RefusedError, match="'d' exists already"):
            evidence.unpack(archive, out)
        assert [(path.name, path.read_bytes()) for path in out.iterdir()] == [("d", b"mine")]

    @pytest.mark.parametrize("what", ["link to a folder", "dangling link", "file"])
    def test_a_folder_on_the_way_that_is_a_link_is_not_followed(self, what: str, archive: Path, tmp_path: Path) -> None:
        out, outside = tmp_path / "out", tmp_path / "outside"
        out.mkdir()
        outside.mkdir()
        if what == "file":
            (out / "a").write_bytes(b"")
        else:
            (out / "a").symlink_to(outside if what == "link to a folder" else tmp_path / "nowhere")
        with pytest.raises(RefusedError, match="is a link or no folder"):
            evidence.unpack(archive, out)
        assert [path.name for path in out.iterdir()] == ["a"]
        assert list(outside.iterdir()) == []

    @pytest.mark.parametrize("what", ["folder", "link", "dangling link"])
    def test_a_target_of_any_other_kind_is_refused(self, what: str, archive: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        out.mkdir()
        (tmp_path / "outside").write_bytes(b"theirs")
        if what == "folder":
            (out / "c").mkdir()
        else:
            (out / "c").symlink_to(tmp_path / ("outside" if what == "link" else "nowhere"))
        with pytest.raises(RefusedError, match="'c' exists already"):
            evidence.unpack(archive, out)
        assert [path.name for path in out.iterdir()] == ["c"]
        assert (tmp_path / "outside").read_bytes() == b"theirs"
        assert not (tmp_path / "nowhere").exists()

    def test_the_folder_itself_may_not_be_a_link(self, archive: Path, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "out").symlink_to(tmp_path / "real")
        with pytest.raises(RefusedError):
            evidence.unpack(archive, tmp_path / "out")
        assert list((tmp_path / "real").iterdir()) == []

    def test_what_is_there_and_not_in_the_way_stays(self, archive: Path, tmp_path: Path) -> None:
        (tmp_path / "out" / "a").mkdir(parents=True)
        (tmp_path / "out" / "a" / "other").write_bytes(b"mine")
        evidence.unpack(archive, tmp_path / "out")
        assert (tmp_path / "out" / "a" / "other").read_bytes() == b"mine"
        assert (tmp_path / "out" / "a" / "one").read_bytes() == MEMBERS["a/one"]

    def test_only_the_members_come_out_as_plain_files_whatever_the_umask(self, archive: Path, tmp_path: Path) -> None:
        before = os.umask(0o077)
        try:
            info = evidence.unpack(archive, tmp_path / "out")
        finally:
            os.umask(before)
        files = [path for path in (tmp_path / "out").rglob("*") if not path.is_dir()]
        assert sorted(str(path.relative_to(tmp_path / "out")) for path in files) == [m.path for m in info.members]
        assert {stat.S_IMODE(path.lstat().st_mode) for path in files} == {0o644}
        assert {path.lstat().st_nlink for path in files} == {1}

    def test_a_missing_archive_and_one_that_is_no_file_are_said(self, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError):
            evidence.verify(tmp_path / "absent.tar")
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path, tmp_path / "pipe"):
            with pytest.raises(RefusedError, match="not a regular file"):
                evidence.verify(path)
