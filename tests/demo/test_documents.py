import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from fanout.demo import documents
from fanout.demo.documents import (
    BadPath,
    DocumentFile,
    MediaKind,
    UnreadableDocument,
    discover,
    display_name,
    installed_documents,
    kind_of,
    path_of,
    sha256_of,
    snapshot,
    storage_key,
)


def tree(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}", encoding="utf-8")
    return root


def names_in(*paths: Path) -> list[str]:
    return [document.path.name for document in discover(paths)]


def only(path: Path) -> DocumentFile:
    [document] = discover([path])
    return document


def test_a_folder_gives_its_documents_and_passes_over_the_rest(tmp_path: Path) -> None:
    """Code, images and archives are no documents; a format we cannot read still is one."""
    tree(tmp_path, "b.md", "a.pdf", "LICENSE", "README", "c.py", "d.png", "e.zip", "old.doc")

    assert names_in(tmp_path) == ["LICENSE", "README", "a.pdf", "b.md", "old.doc"]


def test_folders_come_after_files_in_the_order_of_names(tmp_path: Path) -> None:
    """Two runs over the same tree list the same order."""
    tree(tmp_path, "z.txt", "b/2.txt", "b/1.txt", "a/deep/3.txt")

    found = [str(document.path.relative_to(tmp_path)) for document in discover([tmp_path])]

    assert found == ["z.txt", "a/deep/3.txt", "b/1.txt", "b/2.txt"]


def test_a_file_named_outright_is_yielded_whatever_it_is(tmp_path: Path) -> None:
    """It then fails with a reason, where skipping it would look like success."""
    tree(tmp_path, "c.py", ".hidden.md")

    assert only(tmp_path / "c.py").kind is MediaKind.UNSUPPORTED
    assert only(tmp_path / ".hidden.md").kind is MediaKind.MARKDOWN


def test_hidden_folders_and_installed_trees_are_passed_over(tmp_path: Path) -> None:
    """Nobody means node_modules, .git or a virtual environment by `.`."""
    tree(tmp_path, ".git/a.md", "node_modules/x/README.md", "env/pyvenv.cfg", "env/lib/LICENSE")
    tree(tmp_path, "kept/a.md", ".b.md")

    assert names_in(tmp_path) == ["a.md"]
    assert names_in(tmp_path / ".git") == ["a.md"]


def test_a_loop_of_links_is_walked_once(tmp_path: Path) -> None:
    """A link to a parent folder ends, and no file comes twice."""
    tree(tmp_path, "docs/a.md")
    (tmp_path / "docs" / "up").symlink_to(tmp_path)
    (tmp_path / "again").symlink_to(tmp_path / "docs")
    (tmp_path / "same.md").symlink_to(tmp_path / "docs" / "a.md")

    assert len(list(discover([tmp_path, tmp_path / "docs", tmp_path / "docs" / "a.md"]))) == 1


def test_a_link_to_nowhere_fails_with_its_reason(tmp_path: Path) -> None:
    """It looks like a document, so it is told of."""
    (tmp_path / "lost.pdf").symlink_to(tmp_path / "nowhere.pdf")

    document = only(tmp_path)

    assert document.problem == "the link leads nowhere"
    with pytest.raises(UnreadableDocument, match="the link leads nowhere"):
        snapshot(document)


def test_a_path_that_is_not_there_is_refused_before_the_first_document(tmp_path: Path) -> None:
    """A mistyped argument must not start half a batch."""
    tree(tmp_path, "a.md")

    with pytest.raises(BadPath, match=r"nowhere: no such file or directory"):
        discover([tmp_path, tmp_path / "nowhere"])


def test_a_named_pipe_is_refused(tmp_path: Path) -> None:
    """To open one would wait for ever."""
    os.mkfifo(tmp_path / "pipe.txt")

    assert names_in(tmp_path) == []
    with pytest.raises(BadPath, match="neither a file nor a folder"):
        discover([tmp_path / "pipe.txt"])
    with pytest.raises(UnreadableDocument, match="not a regular file"):
        sha256_of(tmp_path / "pipe.txt")


def test_a_link_to_itself_fails_with_its_reason(tmp_path: Path) -> None:
    """It is neither file nor folder, and asking it raises."""
    (tmp_path / "self.md").symlink_to(tmp_path / "self.md")

    assert only(tmp_path).problem == "too many levels of symbolic links"


def test_what_is_closed_to_this_user_is_told_of(tmp_path: Path) -> None:
    """A closed folder is not silently missing, and does not end the listing."""
    tree(tmp_path, "closed/a.md", "locked.txt", "open/b.txt")
    (tmp_path / "closed").chmod(0)
    (tmp_path / "locked.txt").chmod(0)
    code = (
        "import sys; from pathlib import Path; from fanout.demo.documents import *\n"
        "for found in discover([Path(sys.argv[1])]):\n"
        "    try: print(snapshot(found).name)\n"
        "    except UnreadableDocument as error: print(found.name, error)\n"
    )
    # Root may read all unless it gives these two rights away.
    drop = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    if os.geteuid() == 0 and shutil.which(drop[0]) is None:
        pytest.skip("root here cannot give up its rights: setpriv is missing")

    done = subprocess.run(
        [*(drop if os.geteuid() == 0 else []), sys.executable, "-c", code, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )

    (tmp_path / "closed").chmod(0o700)
    assert done.stdout.replace(f"{tmp_path}/", "").splitlines() == [
        "locked.txt permission denied",
        "closed the folder cannot be listed: permission denied",
        "open/b.txt",
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.PDF", MediaKind.PDF),
        ("a.htm", MediaKind.HTML),
        ("a.Markdown", MediaKind.MARKDOWN),
        ("a.rst", MediaKind.RST),
        ("LICENSE-MIT", MediaKind.TEXT),
        ("LICENSE.APACHE", MediaKind.TEXT),
        ("COPYING", MediaKind.TEXT),
        ("README.md", MediaKind.MARKDOWN),
        ("METADATA", MediaKind.METADATA),
        ("PKG-INFO", MediaKind.METADATA),
        ("license.py", MediaKind.UNSUPPORTED),
        ("readme.odt", MediaKind.UNSUPPORTED),
        ("licensed", MediaKind.UNSUPPORTED),
        ("noise", MediaKind.UNSUPPORTED),
    ],
)
def test_the_name_tells_the_kind(name: str, kind: MediaKind) -> None:
    """Suffixes in any case, and the files that projects write without one."""
    assert kind_of(Path(name)) is kind


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"caf\xe9.txt", "caf\ufffd.txt"),
        ("café 📄.md".encode(), "café 📄.md"),
        ("تقرير.pdf".encode(), "تقرير.pdf"),
        ("a\u202etxt.exe".encode(), "a\ufffdtxt.exe"),
        (b"line\nbreak\x1b[31m.txt", "line\ufffdbreak\ufffd[31m.txt"),
    ],
)
def test_a_name_is_shown_as_text_and_kept_without_loss(raw: bytes, shown: str) -> None:
    """Bytes that are no text, and signs that disturb a terminal, are replaced only for the eye."""
    path = Path("/folder") / os.fsdecode(raw)

    key = storage_key(path)

    assert display_name(path) == f"/folder/{shown}"
    assert path_of(json.loads(json.dumps(key))) == path
    key.encode("utf-8")


def test_a_path_that_looks_like_an_escaped_one_is_kept(tmp_path: Path) -> None:
    """Percent signs in a name are only percent signs."""
    path = tmp_path / "100%25 bytes:.txt"

    assert path_of(storage_key(path)) == path


def test_a_file_named_in_latin_1_is_found_and_snapshot(tmp_path: Path) -> None:
    """The payload holds no lone surrogate."""
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt"))
    path.write_text("hello", encoding="utf-8")

    taken = snapshot(only(tmp_path))

    taken.model_dump_json().encode("utf-8")
    assert path_of(taken.key).read_text(encoding="utf-8") == "hello"


def test_a_snapshot_has_size_and_hash(tmp_path: Path) -> None:
    """They are those of the bytes on disk."""
    (tmp_path / "a.txt").write_bytes(b"hello")

    taken = snapshot(only(tmp_path))

    assert (taken.size_bytes, taken.sha256) == (5, sha256(b"hello").hexdigest())
    assert taken.kind is MediaKind.TEXT


def test_a_long_name_loses_its_beginning_and_fits(tmp_path: Path) -> None:
    """The end of a path is what tells files apart."""
    path = tmp_path / ("ж" * 100) / ("ж" * 100) / "end.txt"
    path.parent.mkdir(parents=True)
    path.write_text("hello", encoding="utf-8")

    document = only(path)

    assert document.name.startswith("…")
    assert document.name.endswith("end.txt")
    assert len(document.name.encode()) <= 240


def test_a_path_too_long_for_a_job_fails_with_a_remedy(tmp_path: Path) -> None:
    """It cannot be carried, so it is said."""
    path = tmp_path.joinpath(*["d" * 200] * 5, "a.txt")
    path.parent.mkdir(parents=True)
    path.write_text("hello", encoding="utf-8")

    with pytest.raises(UnreadableDocument, match=r"the path is too long.*nearer to the root"):
        snapshot(only(path))


def test_a_snapshot_is_below_a_kilobyte(tmp_path: Path) -> None:
    """Also for a deep path in a script of three bytes a letter."""
    path = tmp_path / ("文" * 70) / ("档" * 70 + ".txt")
    path.parent.mkdir()
    path.write_text("hello", encoding="utf-8")

    assert len(snapshot(only(path)).model_dump_json().encode()) <= 1000


def test_a_file_that_went_away_fails_with_its_reason(tmp_path: Path) -> None:
    """Gone between the listing and the snapshot."""
    document = only(tree(tmp_path, "a.txt"))
    document.path.unlink()

    with pytest.raises(UnreadableDocument, match="the file is gone"):
        snapshot(document)


def test_a_huge_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    """A sparse terabyte costs nothing."""
    with (tmp_path / "huge.txt").open("wb") as file:
        file.truncate(1024**4)

    with pytest.raises(
        UnreadableDocument, match=r"too large: 1,048,576\.0 MiB, the limit for text"
    ):
        snapshot(only(tmp_path))


def test_the_installed_packages_give_readmes_metadata_and_licences() -> None:
    """Without a path there are real documents, each once, and all there."""
    found = list(installed_documents())

    assert len(found) > 50
    assert len({document.path for document in found}) == len(found)
    assert {MediaKind.METADATA, MediaKind.TEXT} <= {document.kind for document in found}
    assert all(document.path.is_file() and document.problem is None for document in found)
    assert any(document.name.startswith("pydantic-") for document in found)
    assert not any(document.name.endswith("top_level.txt") for document in found)


def test_finding_documents_loads_no_parser() -> None:
    """The manager that lists files stays light."""
    code = (
        "import sys, fanout.demo.documents, fanout.demo.extract;"
        "print(sorted({'pypdf','docx','lxml','numpy','docutils','markdown_it'} & set(sys.modules)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )

    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    """`__all__` promises nothing that is missing, in order."""
    assert documents.__all__ == sorted(documents.__all__)
    assert all(hasattr(documents, name) for name in documents.__all__)
