from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from fanout.demo.report import Failure, Totals, escape, write_report


def result(**changes: object) -> dict[str, object]:
    return {
        "name": "a.txt",
        "title": "A title",
        "language": "en",
        "words": 1_200,
        "characters": 6_000,
        "key_terms": ["lock", "session"],
        "reading_time_seconds": 303,
        "media_type": "text/plain",
        "size_bytes": 6_100,
        "sha256": "0" * 64,
    } | changes


def rendered(path: Path) -> str:
    return str(MarkdownIt("commonmark").enable("table").render(path.read_text(encoding="utf-8")))


def test_the_report_sums_up_the_corpus(tmp_path: Path) -> None:
    """Counts, words, time, languages, types, terms, the longest, and failures by reason."""
    out = tmp_path / "new" / "report.md"
    results = [
        result(),
        result(name="b.pdf", language="fr", words=2_000, media_type="application/pdf"),
        result(name="c.txt", key_terms=["lock"]),
    ]
    failures = [Failure("x.pdf", "the PDF is encrypted"), Failure("y.pdf", "the PDF is encrypted")]

    corpus = write_report(results, failures, Totals(5, 3, 2, elapsed_seconds=1.5), out)

    text = out.read_text(encoding="utf-8")
    assert corpus.words == 4_400
    for line in (
        "| Documents | 5 |",
        "| Words | 4,400 |",
        "| Reading time | 15 min |",
        "| Took | 1.5 s |",
        "| en | 2 | 2,400 |",
        "| fr | 1 | 2,000 |",
        "| application/pdf | 1 |",
        "| lock | 3 |",
        "| b.pdf | A title | 2,000 |",
        "| the PDF is encrypted | 2 | x.pdf, y.pdf |",
    ):
        assert line in text.splitlines()
    assert text.index("| b.pdf |") < text.index("| a.txt |") < text.index("| c.txt |")


def test_a_report_of_nothing_is_a_report(tmp_path: Path) -> None:
    """An empty batch ends like any other."""
    write_report([], [], Totals(0, 0, 0), tmp_path / "r.md")

    assert "| Documents | 0 |" in (tmp_path / "r.md").read_text(encoding="utf-8")


def test_a_count_that_differs_from_the_engine_s_is_told(tmp_path: Path) -> None:
    """A report that hides a missing result would be worth nothing."""
    write_report([result()], [], Totals(2, 2, 0), tmp_path / "r.md")

    assert "**The counts differ:** this report saw 1 results" in (tmp_path / "r.md").read_text(
        encoding="utf-8"
    )


HOSTILE = [
    "<script>alert(1)</script>.md",
    "![x](https://x.example/p.png)",
    "[click](javascript:alert(1))",
    "a | b | c",
    "`code` **bold** __under__ ~~gone~~ $x$ &amp; &#60;",
    "# heading\n\n- list\n| --- |",
    "\\<b>\\|",
    "https://x.example www.x.example me@x.example",
    "تقرير 📄 日本.pdf",
    "trailing\\",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_a_name_holds_is_shown_as_it_is(tmp_path: Path, name: str) -> None:
    """No tag, link, image or cell of its own comes of it."""
    out = tmp_path / "r.md"

    write_report([result(name=name, title=name)], [Failure(name, name)], Totals(2, 1, 1), out)

    html = rendered(out)
    shown = " ".join(name.split())
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        shown = shown.replace(character, entity)
    assert html.count(f"<td>{shown}</td>") == 4
    assert not any(tag in html for tag in ("<script", "<img", "<a ", "<code", "<strong", "<b>"))


def test_bare_addresses_are_no_links_for_renderers_that_make_them() -> None:
    """The signs that start one are escaped."""
    assert escape("http://x www.x a@b") == r"http\://x www\.x a\@b"


def test_a_report_that_fails_halfway_leaves_the_old_one(tmp_path: Path) -> None:
    """Whole or not at all, and no scraps beside it."""
    out = tmp_path / "r.md"
    out.write_text("old", encoding="utf-8")

    def broken() -> Iterator[Mapping[str, object]]:
        yield result()
        raise ConnectionError

    with pytest.raises(ConnectionError):
        write_report(broken(), [], Totals(1, 1, 0), out)

    assert out.read_text(encoding="utf-8") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["r.md"]


def test_a_folder_in_the_place_of_the_report_leaves_no_scraps(tmp_path: Path) -> None:
    """The temporary file goes when the rename fails."""
    (tmp_path / "r.md").mkdir()

    with pytest.raises(OSError, match="directory"):
        write_report([result()], [], Totals(1, 1, 0), tmp_path / "r.md")

    assert [path.name for path in tmp_path.iterdir()] == ["r.md"]


def test_a_hundred_thousand_documents_keep_the_counters_bounded(tmp_path: Path) -> None:
    """Rare terms and rare reasons are let go; the frequent ones are exact to the last."""
    results = (
        result(name=f"{n}.txt", words=n, key_terms=["lock", f"rare {n}"]) for n in range(100_000)
    )
    failures = (Failure(f"{n}", f"reason {n}") for n in range(3_000))

    corpus = write_report(results, failures, Totals(103_000, 100_000, 3_000), tmp_path / "r.md")

    assert corpus.key_terms["lock"] == 100_000
    assert len(corpus.key_terms) <= 50_000
    assert len(corpus.reasons) == 1_001
    assert corpus.failures == sum(corpus.reasons.values()) == 3_000
    assert [words for words, _, _ in corpus.longest] == list(range(99_999, 99_989, -1))
