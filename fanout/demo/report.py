"""Sum up the corpus and write it down as one Markdown file.

Results and failures are read once, as they come; what is kept is counters with a bound each, so
a corpus of a hundred thousand documents takes some megabytes. Whatever a document says about
itself is escaped: a file name cannot become a heading, a link or HTML.
"""

import contextlib
import heapq
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["Corpus", "Failure", "Totals", "escape", "write_report"]

_LISTED: Final = 20
_LONGEST: Final = 10
_EXAMPLES: Final = 5
_DISTINCT_TERMS: Final = 50_000
_DISTINCT_REASONS: Final = 1_000
_OTHER_REASONS: Final = "other reasons"


@dataclass(frozen=True, slots=True)
class Failure:
    """A document that could not be read."""

    name: str
    """What to show for it."""
    reason: str
    """Why, for a person."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What the engine counted, for the head of the report."""

    documents: int
    """Documents in the batch."""
    succeeded: int
    """Documents read."""
    failed: int
    """Documents that could not be read."""
    elapsed_seconds: float | None = None
    """From submit to close; None when it is not known."""


@dataclass(slots=True)
class Corpus:
    """What was seen while results and failures went by."""

    results: int = 0
    """Results seen."""
    failures: int = 0
    """Failures seen."""
    words: int = 0
    """Words of all documents."""
    characters: int = 0
    """Characters of text of all documents."""
    size_bytes: int = 0
    """Bytes of all files read."""
    reading_time_seconds: int = 0
    """Time a person needs to read it all."""
    languages: Counter[str] = field(default_factory=Counter)
    """Documents for each language code."""
    words_by_language: Counter[str] = field(default_factory=Counter)
    """Words for each language code."""
    media_types: Counter[str] = field(default_factory=Counter)
    """Documents for each media type."""
    key_terms: Counter[str] = field(default_factory=Counter)
    """Documents for each key term; the rarest are forgotten when there are too many."""
    longest: list[tuple[int, str, str]] = field(default_factory=list)
    """The longest documents: words, name, title; the longest first once all is read."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Failures for each reason."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """For each reason, the first few names."""

    def add_result(self, result: Mapping[str, object]) -> None:
        """Count one result: the fields of `extract.Extracted`; a missing one counts as nothing."""
        words, language = _number(result, "words"), _text(result, "language") or "und"
        self.results += 1
        self.words += words
        self.characters += _number(result, "characters")
        self.size_bytes += _number(result, "size_bytes")
        self.reading_time_seconds += _number(result, "reading_time_seconds")
        self.languages[language] += 1
        self.words_by_language[language] += words
        self.media_types[_text(result, "media_type") or "unknown"] += 1
        terms = result.get("key_terms")
        if isinstance(terms, Sequence) and not isinstance(terms, str):
            self.key_terms.update(str(term).lower() for term in terms)
        if len(self.key_terms) > _DISTINCT_TERMS:
            self.key_terms = Counter(dict(self.key_terms.most_common(_DISTINCT_TERMS // 2)))
        entry = (words, _text(result, "name"), _text(result, "title"))
        if len(self.longest) < _LONGEST:
            heapq.heappush(self.longest, entry)
        else:
            heapq.heappushpop(self.longest, entry)

    def add_failure(self, failure: Failure) -> None:
        """Count one failure under its reason."""
        reason = failure.reason
        if reason not in self.reasons and len(self.reasons) >= _DISTINCT_REASONS:
            reason = _OTHER_REASONS
        self.failures += 1
        self.reasons[reason] += 1
        names = self.examples.setdefault(reason, [])
        if len(names) < _EXAMPLES:
            names.append(failure.name)


def _number(result: Mapping[str, object], field_name: str) -> int:
    value = result.get(field_name)
    return value if isinstance(value, int) else 0


def _text(result: Mapping[str, object], field_name: str) -> str:
    value = result.get(field_name)
    return value if isinstance(value, str) else ""


def write_report(
    results: Iterable[Mapping[str, object]],
    failures: Iterable[Failure],
    totals: Totals,
    out: Path,
) -> Corpus:
    """Write the report to `out`, whole or not at all, and return what it counted.

    `results` have the fields of `extract.Extracted`. Both iterables are consumed, one item held at
    a time. The folder of `out` is made when missing; an older report there is replaced only when
    the new one is complete.

    Raises:
        OSError: the folder cannot be written to; `out` is as it was.

    """
    corpus = Corpus()
    for result in results:
        corpus.add_result(result)
    for failure in failures:
        corpus.add_failure(failure)
    corpus.longest.sort(key=lambda entry: (-entry[0], entry[1]))
    _write_atomically(out, _lines(corpus, totals))
    return corpus


def _write_atomically(out: Path, lines: Iterable[str]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=out.parent, prefix=".report-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes it private; a report is for whoever may read the folder.
        Path(temporary).chmod(0o644)
        Path(temporary).replace(out)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def _lines(corpus: Corpus, totals: Totals) -> Iterator[str]:
    yield "# Corpus report"
    yield ""
    yield from _overview(corpus, totals)
    yield from _section("Languages", ("Language", "Documents", "Words"), _languages(corpus))
    yield from _section(
        "Media types", ("Media type", "Documents"), _ranked(corpus.media_types, _LISTED)
    )
    yield from _section(
        "Most frequent key terms", ("Term", "Documents"), _ranked(corpus.key_terms, _LISTED)
    )
    yield from _section("Longest documents", ("Document", "Title", "Words"), _longest(corpus))
    yield from _section("Failures", ("Reason", "Documents", "Examples"), _failures(corpus))


def _overview(corpus: Corpus, totals: Totals) -> Iterator[str]:
    rows = [
        ("Documents", f"{totals.documents:,}"),
        ("Read", f"{totals.succeeded:,}"),
        ("Failed", f"{totals.failed:,}"),
        ("Words", f"{corpus.words:,}"),
        ("Characters", f"{corpus.characters:,}"),
        ("Bytes read", f"{corpus.size_bytes:,}"),
        ("Reading time", _duration(corpus.reading_time_seconds)),
    ]
    if totals.elapsed_seconds is not None:
        rows.append(("Took", f"{totals.elapsed_seconds:,.1f} s"))
    yield from _table(("", ""), rows)
    if (corpus.results, corpus.failures) != (totals.succeeded, totals.failed):
        yield (
            f"**The counts differ:** this report saw {corpus.results:,} results and "
            f"{corpus.failures:,} failures, the engine counted {totals.succeeded:,} and "
            f"{totals.failed:,}."
        )
        yield ""


def _languages(corpus: Corpus) -> Iterator[tuple[str, ...]]:
    for language, documents in _by_count(corpus.languages):
        yield escape(language), f"{documents:,}", f"{corpus.words_by_language[language]:,}"


def _longest(corpus: Corpus) -> Iterator[tuple[str, ...]]:
    for words, name, title in corpus.longest:
        yield escape(name), escape(title), f"{words:,}"


def _failures(corpus: Corpus) -> Iterator[tuple[str, ...]]:
    for reason, documents in _by_count(corpus.reasons):
        names = corpus.examples[reason]
        more = ", …" if documents > len(names) else ""
        yield escape(reason), f"{documents:,}", ", ".join(map(escape, names)) + more


def _ranked(counts: Counter[str], limit: int) -> Iterator[tuple[str, ...]]:
    for value, documents in _by_count(counts)[:limit]:
        yield escape(value), f"{documents:,}"


def _by_count(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _section(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    yield from _table(heads, rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    listed = list(rows)
    if not listed:
        yield "None."
        yield ""
        return
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    for row in listed:
        yield f"| {' | '.join(row)} |"
    yield ""


_MINUTE: Final = 60
_HOUR: Final = 60 * _MINUTE


def _duration(seconds: int) -> str:
    if seconds < _MINUTE:
        return f"{seconds} s"
    hours, rest = divmod(seconds, _HOUR)
    return f"{hours:,} h {rest // _MINUTE} min" if hours else f"{rest // _MINUTE} min"


_SPECIAL: Final = re.compile(r"""([\\`*_{}\[\]()<>#|~!$^&@:"']|(?<=[wW])\.)""")


def escape(text: str) -> str:
    """Make `text` plain inside Markdown, in a table cell too: it shows as it is, on one line.

    Colons, at signs and the dot of `www.` are escaped as well: some renderers make links of bare
    addresses.
    """
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
