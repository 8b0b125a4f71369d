import os
import random
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest

from fanout.demo import extract as extract_module
from fanout.demo.documents import MediaKind
from fanout.demo.extract import UnreadableDocument, extract
from tests.demo import builders

ENGLISH = "The quick brown fox jumps over the lazy dog, and then the dog sleeps in the sun."
FRENCH = "Le café est fermé à Noël ; où êtes-vous ? L'été dernier nous étions à la plage."
GERMAN = "Die Straße ist für Fußgänger gesperrt, bitte nutzen Sie die Brücke über den Fluß."
RUSSIAN = "Съешь же ещё этих мягких французских булок, да выпей чаю."


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def reason_of(path: Path, kind: MediaKind | None = None) -> str:
    with pytest.raises(UnreadableDocument) as caught:
        extract(path, kind)
    return str(caught.value)


def test_a_plain_text_gives_every_fact(tmp_path: Path) -> None:
    """Title, language, words, characters, terms, time, hash, size and type."""
    text = f"Foxes and dogs\n==============\n\n{ENGLISH}\n"
    path = written(tmp_path, "a.txt", text)

    found = extract(path)

    assert found.title == "Foxes and dogs"
    assert found.language == "en"
    assert found.words == 20
    assert found.characters == len(text.strip())
    assert found.reading_time_seconds == 6
    assert found.sha256 == sha256(text.encode()).hexdigest()
    assert found.size_bytes == len(text)
    assert (found.media_type, found.name) == ("text/plain", "a.txt")
    assert "dog" in found.key_terms
    assert "the" not in found.key_terms


@pytest.mark.parametrize(
    ("text", "encoding", "language"),
    [
        (FRENCH, "latin-1", "fr"),
        (FRENCH, "utf-16", "fr"),
        (FRENCH, "utf-16-le", "fr"),
        (FRENCH, "utf-16-be", "fr"),
        (FRENCH, "utf-8-sig", "fr"),
        (FRENCH, "utf-32", "fr"),
        (GERMAN, "cp1252", "de"),
        (RUSSIAN, "cp1251", "ru"),
        (RUSSIAN, "koi8-r", "ru"),
        (RUSSIAN, "utf-8", "ru"),
    ],
)
def test_a_text_is_read_whatever_its_encoding(
    tmp_path: Path, text: str, encoding: str, language: str
) -> None:
    """The same text comes out, and its language with it."""
    found = extract(written(tmp_path, "a.txt", text.encode(encoding)))

    assert found.title == text.strip(" .")
    assert found.language == language
    assert found.characters == len(text)


def test_html_gives_what_a_reader_sees(tmp_path: Path) -> None:
    """No scripts or styles; blocks part words, inline marks do not."""
    page = (
        "<html><head><title> Foxes &amp;\n dogs </title><style>p{}</style></head><body>"
        "<script>var hidden=1</script><!-- nor this -->"
        "<p>un<b>believ</b>able</p><table><tr><td>one</td><td>two</td></tr></table>three<br>four"
    )

    found = extract(written(tmp_path, "a.html", page))

    assert found.title == "Foxes & dogs"
    assert found.words == 5
    assert found.media_type == "text/html"


def test_html_in_the_encoding_it_declares_is_read_so(tmp_path: Path) -> None:
    """`charset` in the page wins over a guess."""
    page = f'<meta charset="windows-1251"><title>Булки</title><p>{RUSSIAN}'.encode("cp1251")

    found = extract(written(tmp_path, "a.html", page))

    assert (found.title, found.language) == ("Булки", "ru")


def test_html_that_names_an_encoding_nobody_knows_is_read_all_the_same(tmp_path: Path) -> None:
    """What is declared is a hint."""
    found = extract(written(tmp_path, "a.html", f"<meta charset=klingon><p>{ENGLISH}"))

    assert found.language == "en"


def test_markdown_is_read_without_its_marks(tmp_path: Path) -> None:
    """The first heading is the title; links keep their text; embedded HTML is HTML."""
    source = (
        f"# Foxes *and* dogs\n\n<p align=center>badge</p>\n\n[link](https://x.example) {ENGLISH}"
    )

    found = extract(written(tmp_path, "a.md", source))

    assert found.title == "Foxes and dogs"
    assert found.words == 3 + 1 + 1 + 17


def test_front_matter_of_markdown_names_the_title(tmp_path: Path) -> None:
    """It is no text of the document."""
    source = f'---\ntitle: "Named above"\ntags: [a]\n---\n\n# Heading\n\n{ENGLISH}'

    found = extract(written(tmp_path, "a.md", source))

    assert (found.title, found.words) == ("Named above", 18)


def test_restructuredtext_is_read_without_its_marks(tmp_path: Path) -> None:
    """Unknown directives and roles, as Sphinx has them, do not fail a document."""
    source = f"Foxes\n=====\n\n.. a comment\n\n.. toctree::\n\n   other\n\n:ref:`dogs` {ENGLISH}\n"

    found = extract(written(tmp_path, "a.rst", source))

    assert found.title == "Foxes"
    assert found.media_type == "text/x-rst"
    assert found.words >= 18


def test_restructuredtext_reads_no_other_file(tmp_path: Path) -> None:
    """`include`, `raw` and `csv-table` would hand out what the worker may read."""
    secret = written(tmp_path, "secret.txt", "topsecretword " * 50)
    source = (
        f"Foxes\n=====\n\n{ENGLISH}\n\n.. include:: {secret}\n\n"
        f".. raw:: html\n   :file: {secret}\n\n"
        f".. csv-table::\n   :file: {secret}\n\n.. literalinclude:: {secret}\n"
    )

    found = extract(written(tmp_path, "a.rst", source))

    assert "topsecretword" not in found.key_terms
    assert found.words < 50


def test_documents_read_at_once_do_not_share_a_default_role(tmp_path: Path) -> None:
    """The library keeps it in a global; threads must not see each other's."""
    plain = written(tmp_path, "plain.rst", f"Title\n=====\n\n`word` {ENGLISH}\n")
    other = written(
        tmp_path, "other.rst", ".. default-role:: raw\n\nText `x` here\n" + f"{ENGLISH}\n\n" * 50
    )
    expected = extract(plain).words

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(extract, [plain, other] * 20))

    assert {item.words for item in found[::2]} == {expected}


def test_package_metadata_is_its_summary_and_readme(tmp_path: Path) -> None:
    """Headers are not text; the title is the package and its version."""
    source = (
        "Metadata-Version: 2.4\nName: fox\nVersion: 1.2\nSummary: Foxes for all\n"
        "Classifier: Programming Language :: Python\n"
        f"Description-Content-Type: text/markdown; charset=UTF-8\n\n# Fox\n\n{ENGLISH}\n"
    )

    found = extract(written(tmp_path, "METADATA", source))

    assert found.title == "fox 1.2"
    assert found.words == 3 + 1 + 17
    assert found.media_type == "text/x-python-metadata"


def test_old_package_metadata_has_its_readme_in_a_header(tmp_path: Path) -> None:
    """Folded lines of `Description` are put back."""
    source = (
        f"Name: fox\nVersion: 1.2\nDescription: Fox\n        ===\n        \n        {ENGLISH}\n"
    )

    found = extract(written(tmp_path, "PKG-INFO", source))

    assert found.words == 1 + 17


def test_a_word_document_is_read_with_its_tables(tmp_path: Path) -> None:
    """The title is its Title paragraph when its properties have none."""
    path = builders.docx_file(tmp_path / "a.docx", heading="Foxes", paragraphs=[ENGLISH, "last"])

    found = extract(path)

    assert found.title == "Foxes"
    assert found.words == 1 + 17 + 1 + 2
    assert found.language == "en"


def test_a_pdf_is_read_page_by_page(tmp_path: Path) -> None:
    """Title from its properties, text of all pages."""
    path = written(tmp_path, "a.pdf", builders.pdf_bytes([ENGLISH, "second page"], title="Foxes"))

    found = extract(path)

    assert (found.title, found.words, found.language) == ("Foxes", 19, "en")


def test_a_pdf_locked_against_changes_only_is_read(tmp_path: Path) -> None:
    """Its password to read is empty."""
    assert extract(builders.encrypted_pdf(tmp_path / "a.pdf", user_password="")).words == 5


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    """Each reason is a sentence for a person, never a traceback."""
    word = builders.docx_file(tmp_path / "ok.docx", heading="H", paragraphs=[ENGLISH]).read_bytes()
    pdf = builders.pdf_bytes([ENGLISH] * 3)
    with zipfile.ZipFile(tmp_path / "zip.docx", "w") as archive:
        archive.writestr("hello.txt", "hello")
    builders.encrypted_pdf(tmp_path / "locked.pdf", user_password="secret")  # noqa: S106 - of a test file
    noise = random.Random(1).randbytes(4_096).replace(b"\x00", b"\xff")
    cases = {
        "empty.txt": (b"", "the file is empty"),
        "blank.txt": (b" \n\t\n", "no text found"),
        "signs.txt": (b"!!! ??? ---", "no text found"),
        "nul.txt": (b"hello\x00world, this is text", "binary file, not text: it has NUL bytes"),
        "noise.txt": (noise, "binary file, not text"),
        "image.md": (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "binary file, not text: it has NUL"),
        "page.html": (b"<!-- nothing -->", "no text found"),
        "fake.pdf": (b"hello, I am text", "not a PDF: its header is missing"),
        "torn.pdf": (pdf[:200], "the PDF is damaged ("),
        "header.pdf": (b"%PDF-1.4\n", "the PDF is damaged ("),
        "scan.pdf": (builders.pdf_bytes(["", ""]), "no text found (scanned images?)"),
        "locked.pdf": (None, "the PDF is encrypted"),
        "fake.docx": (b"hello", "the DOCX archive is damaged"),
        "torn.docx": (word[: len(word) // 2], "the DOCX archive is damaged"),
        "zip.docx": (None, "not a Word document inside ("),
        "old.docx": (
            b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(500),
            "not a DOCX: it is encrypted",
        ),
        "a.xyz": (b"hello", "unsupported type .xyz: supported are .docx, .htm, .html,"),
        "noext": (b"hello", "unsupported type, no suffix: supported are .docx,"),
        "PKG-INFO": (b"hello\n", "no package metadata: the Name header is missing"),
    }
    for name, (content, expected) in cases.items():
        path = tmp_path / name if content is None else written(tmp_path, name, content)

        assert reason_of(path).startswith(expected), name


def test_what_is_not_a_file_says_so(tmp_path: Path) -> None:
    """Gone, a folder, or a pipe that would be waited on for ever."""
    os.mkfifo(tmp_path / "pipe.txt")

    assert reason_of(tmp_path / "gone.txt") == "the file is gone"
    assert reason_of(tmp_path, MediaKind.TEXT) == "a folder, not a file"
    assert reason_of(tmp_path / "pipe.txt") == "not a regular file"


def test_damaged_documents_never_raise_anything_else(tmp_path: Path) -> None:
    """Every byte of a PDF and a DOCX flipped in turn ends in text or in a reason."""
    pdf = builders.pdf_bytes([ENGLISH])
    word = builders.docx_file(tmp_path / "ok.docx", heading="H", paragraphs=["x"]).read_bytes()
    for name, content, step in (("a.pdf", pdf, 11), ("a.docx", word, 509)):
        for place in range(0, len(content), step):
            torn = bytearray(content)
            torn[place] ^= 0xFF
            path = written(tmp_path, name, bytes(torn))
            try:
                extract(path)
            except UnreadableDocument as error:
                assert "Traceback" not in str(error)  # noqa: PT017 - most of them still read


def test_a_bomb_in_a_word_document_is_refused_unread(tmp_path: Path) -> None:
    """What it unpacks to is known before it is unpacked."""
    path = builders.docx_file(tmp_path / "a.docx", heading="H", paragraphs=["x"])
    builders.repacked(path, {"word/media/bomb.bin": bytes(200 * 1024 * 1024)})

    assert reason_of(path).startswith("the DOCX unpacks to more than is read: 2")


def test_a_pdf_with_thousands_of_pages_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason has both numbers."""
    monkeypatch.setattr(extract_module, "_PAGES_LIMIT", 3)
    path = written(tmp_path, "a.pdf", builders.pdf_bytes(["x"] * 4))

    assert reason_of(path) == "the PDF has 4 pages, the limit is 3"


def test_a_pdf_that_computes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at the page where its time is over."""
    monkeypatch.setattr(extract_module, "_PDF_CPU_SECONDS", 0.0)
    path = written(tmp_path, "a.pdf", builders.pdf_bytes(["x"] * 4))

    assert reason_of(path).startswith("the PDF takes too long: page 1 of 4")


def test_restructuredtext_that_computes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at the next paragraph."""
    monkeypatch.setattr(extract_module, "_RST_CPU_SECONDS", 0.0)
    path = written(tmp_path, "a.rst", ENGLISH)

    assert reason_of(path) == "the reStructuredText takes more than 0 s of computing"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.html", "<div>" * 200_000 + "x"),
        ("a.md", "> " * 50_000 + "x"),
        ("b.md", "[" * 50_000 + "x"),
        ("c.md", "*a " * 50_000),
        ("d.md", "<div>\n\n" * 20_000 + "x"),
        ("a.rst", "`" * 100_000 + "x"),
        ("b.rst", "*a " * 20_000),
        ("c.rst", ("*a " * 1_000 + "\n\n") * 10),
        ("d.rst", "".join(" " * n + "- a\n\n" for n in range(1_000))),
        ("a.txt", "a" * 2_000_000),
        ("b.txt", "a." * 1_000_000),
        ("c.txt", "a@" * 500_000),
        ("d.txt", "-a" * 1_000_000),
    ],
)
def test_a_hostile_text_ends_soon(tmp_path: Path, name: str, content: str) -> None:
    """Nothing nests or repeats its way to minutes of work."""
    path = written(tmp_path, name, content)
    started = time.thread_time()

    try:
        extract(path)
    except UnreadableDocument as error:
        assert str(error)  # noqa: PT017 - text or a reason, both are fine

    assert time.thread_time() - started < 10


def test_a_huge_file_is_refused_by_its_size(tmp_path: Path) -> None:
    """The limit is that of its kind."""
    path = tmp_path / "a.rst"
    with path.open("wb") as file:
        file.truncate(3 * 1024 * 1024)

    assert reason_of(path) == "too large: 3.0 MiB, the limit for rst is 1.0 MiB"


def test_what_comes_out_has_nothing_that_json_or_postgresql_refuses(tmp_path: Path) -> None:
    """No NUL, control character or reordering mark in title or terms; the title is bounded."""
    text = "Ti\x1btle\u202e \x07" + "word " * 200 + "\n\n" + ENGLISH

    found = extract(written(tmp_path, "a.txt", text))

    assert found.title.startswith("Title word")
    assert len(found.title) <= 200
    assert found.model_dump_json().encode("utf-8")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("don't stop-gap snake_case", 3),
        ("l\u2019été e\u0301te\u0301", 2),
        ("हिन्दी में लिखा", 3),
        ("日本語の文", 5),
        ("3.14 and 2026-01-02", 4),
        ("שלום עולם", 2),
        ("📄 🎉 hello", 1),
    ],
)
def test_words_are_counted_as_people_count(tmp_path: Path, text: str, words: int) -> None:
    """Marks belong to their letters; an ideograph counts as one."""
    assert extract(written(tmp_path, "a.txt", text)).words == words


def test_key_terms_are_what_the_text_comes_back_to(tmp_path: Path) -> None:
    """A pair that keeps together is one term, spelled as the text spells it most often."""
    text = (
        "The Advisory Lock is taken first. An advisory lock is cheap; the Advisory Lock ends with"
        " its session. PostgreSQL knows the session."
    )

    found = extract(written(tmp_path, "a.txt", text))

    assert found.key_terms[0] == "Advisory Lock"
    assert "session" in found.key_terms
    assert len(found.key_terms) <= 8


def test_a_text_of_no_language_is_undetermined(tmp_path: Path) -> None:
    """A guess without ground would be counted as a fact."""
    assert extract(written(tmp_path, "a.txt", "0x7f 12 99 0xff\n" * 20)).language == "und"


def test_the_name_is_the_one_given(tmp_path: Path) -> None:
    """A caller knows where in the corpus the file is."""
    path = written(tmp_path, "a.txt", ENGLISH)

    assert extract(path, MediaKind.TEXT, name="docs/a.txt").name == "docs/a.txt"


def test_a_file_whose_name_is_no_text_is_read(tmp_path: Path) -> None:
    """Its title falls back on its first line, its name is shown with a sign for the byte."""
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt"))
    path.write_text(ENGLISH, encoding="utf-8")

    assert extract(path).name == "caf\ufffd.txt"


def test_threads_load_the_language_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight first documents at once, one model."""
    loads: list[int] = []

    def classifier() -> object:
        loads.append(threading.get_ident())
        time.sleep(0.05)
        return lambda text: ("en", 1.0)

    monkeypatch.setattr(extract_module, "_classifier", cache(classifier))
    path = written(tmp_path, "a.txt", ENGLISH)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(extract, [path] * 8))

    assert len(loads) == 1


def test_the_first_documents_may_be_read_by_threads_at_once(tmp_path: Path) -> None:
    """Libraries that fill tables on first use do so before a second thread looks: no document of a
    new process fails for want of luck."""
    (tmp_path / "links.md").write_text("[a](http://example.org/%20b?c=d) <http://e.org/%20f>\n" * 9)
    program = f"""
import threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import mdurl._decode, mdurl._encode
from fanout.demo.extract import MediaKind, extract

class Slow(dict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value)  # still empty, and there for everybody
        time.sleep(0.1)

mdurl._decode.decode_cache, mdurl._encode.encode_cache = Slow(), Slow()
start = threading.Barrier(4)

def read(_):
    start.wait()
    return extract(Path({str(tmp_path / "links.md")!r}), MediaKind.MARKDOWN, name="links.md").words

with ThreadPoolExecutor(4) as pool:
    assert len(set(pool.map(read, range(4)))) == 1
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
