"""Read one document: its text by a library for its kind, then what the text says of itself.

Work is bounded before it is done: bytes by kind, pages and CPU seconds of a PDF, what a DOCX
unpacks to, depth of HTML; language and key terms look at samples. What cannot be read is an
`UnreadableDocument` with a reason a person understands. The functions are synchronous and use a
core: run them in threads or processes.
"""

import email
import email.policy
import hashlib
import io
import logging
import math
import re
import stat
import threading
import time
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict

from fanout.demo.documents import (
    SUPPORTED_SUFFIXES,
    MediaKind,
    UnreadableDocument,
    check_size,
    display_name,
    kind_of,
    readable,
)

if TYPE_CHECKING:
    from pypdf import PdfReader

__all__ = ["Extracted", "UnreadableDocument", "extract"]

WORDS_PER_MINUTE: Final = 238
"""Silent reading of non-fiction by adults; Brysbaert 2019, a review of 190 studies."""
KEY_TERMS: Final = 8
TITLE_LIMIT: Final = 200
"""Most characters of a title."""

_CHARACTERS_LIMIT: Final = 16 * 1024 * 1024
_PAGES_LIMIT: Final = 2_000
_PDF_CPU_SECONDS: Final = 60.0
_RST_CPU_SECONDS: Final = 20.0
_RST_PARAGRAPH_LIMIT: Final = 3_000
_PAGE_CONTENT_LIMIT_BYTES: Final = 8 * 1024 * 1024
_UNPACKED_LIMIT_BYTES: Final = 128 * 1024 * 1024
_UNPACKED_XML_LIMIT_BYTES: Final = 32 * 1024 * 1024
_ENTRIES_LIMIT: Final = 5_000
_ENCODING_SAMPLE_BYTES: Final = 64 * 1024
_LANGUAGE_SAMPLE: Final = 4_000
_TERMS_SAMPLE: Final = 30_000
_TERM_LENGTH: Final = range(3, 41)


class Extracted(BaseModel):
    """What a document says of itself; every text is valid Unicode without control characters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """The file, fit to be shown."""
    title: str
    """What the document calls itself, else its first line, else the file's name."""
    language: str
    """ISO 639 code, as `en`; `und` when the text gives no clear sign."""
    words: int
    """Words; a Chinese or Japanese character counts as one."""
    characters: int
    """Characters of text, without the space around it."""
    key_terms: tuple[str, ...]
    """Up to 8 words or pairs of words that the text comes back to, the strongest first."""
    reading_time_seconds: int
    """Time to read it at 238 words a minute, rounded up."""
    media_type: str
    """As `application/pdf`."""
    size_bytes: int
    """Size of the file."""
    sha256: str
    """Hash of the bytes that were read, 64 hexadecimal digits."""


class _Text(NamedTuple):
    title: str
    body: str


def extract(path: Path, kind: MediaKind | None = None, *, name: str | None = None) -> Extracted:
    """Read the document at `path`; `kind` and `name` are told from the path when not given.

    Raises:
        UnreadableDocument: it cannot be read, and a second try would end the same.
        OSError: the disk failed; a later try may work.

    """
    kind = kind or kind_of(path)
    with readable(), _opened(path) as file:
        size_bytes = file.seek(0, io.SEEK_END)
        check_size(size_bytes, kind)
        if size_bytes == 0:
            raise UnreadableDocument("the file is empty")
        file.seek(0)
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        read = _READERS.get(kind)
        if read is None:
            raise UnreadableDocument(_unsupported(path))
        title, body = read(file)
    body = _clean(body)
    words = _count_words(body)
    if words == 0:
        scan = " (scanned images?)" if kind is MediaKind.PDF else ""
        raise UnreadableDocument(f"no text found{scan}")
    prose = _ADDRESSES.sub(" ", body)
    language = _language(prose)
    return Extracted(
        name=name if name is not None else display_name(path.name),
        title=_title(title) or _title(_first_line(body)) or display_name(path.name),
        language=language,
        words=words,
        characters=len(body),
        key_terms=_key_terms(prose[:_TERMS_SAMPLE], language),
        reading_time_seconds=math.ceil(words * 60 / WORDS_PER_MINUTE),
        media_type=kind.media_type,
        size_bytes=size_bytes,
        sha256=sha256,
    )


def _opened(path: Path) -> io.BufferedReader:
    # Asked before opening: to open a named pipe waits for its writer, for ever if need be.
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError
    if not stat.S_ISREG(mode):
        raise UnreadableDocument("not a regular file")
    return path.open("rb")


def _unsupported(path: Path) -> str:
    what = f"type {display_name(path.suffix.lower())}" if path.suffix else "type, no suffix"
    return f"unsupported {what}: supported are {', '.join(SUPPORTED_SUFFIXES)}"


# --- one reader for each kind -------------------------------------------------------------------


def _read_pdf(file: io.BufferedReader) -> _Text:
    if b"%PDF-" not in file.read(1024):
        raise UnreadableDocument("not a PDF: its header is missing")
    file.seek(0)
    import pypdf  # noqa: PLC0415 - 0.15 s, only for who reads a PDF

    # pypdf tells of every repair on the root logger's stderr; the outcome here is enough.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    try:
        reader = pypdf.PdfReader(file)
        pages = list(_page_texts(reader))
        title = reader.metadata.title if reader.metadata else None
    except (UnreadableDocument, MemoryError):
        raise
    except pypdf.errors.DependencyError as error:
        raise UnreadableDocument("the PDF is encrypted") from error
    except pypdf.errors.LimitReachedError as error:
        raise UnreadableDocument("the PDF unpacks to more than is read") from error
    except Exception as error:  # damaged bytes raise whatever they meet; the same each time
        raise UnreadableDocument(f"the PDF is damaged ({type(error).__name__})") from error
    return _Text(title if isinstance(title, str) else "", "\n\n".join(pages))


def _page_texts(reader: "PdfReader") -> Iterator[str]:
    # Many are locked against printing only, and open with no password.
    if reader.is_encrypted and not reader.decrypt(""):
        raise UnreadableDocument("the PDF is encrypted")
    count = len(reader.pages)
    if count > _PAGES_LIMIT:
        raise UnreadableDocument(f"the PDF has {count:,} pages, the limit is {_PAGES_LIMIT:,}")
    # CPU of this thread, not time on the wall: a busy machine must not decide what can be read.
    give_up, characters = time.thread_time() + _PDF_CPU_SECONDS, 0
    for number, page in enumerate(reader.pages, start=1):
        content = page.get_contents()
        if content is not None and len(content.get_data()) > _PAGE_CONTENT_LIMIT_BYTES:
            raise UnreadableDocument(f"page {number} of the PDF is too large to read")
        text = page.extract_text()
        characters += len(text)
        if characters > _CHARACTERS_LIMIT:
            raise UnreadableDocument("the PDF has more text than is read")
        if time.thread_time() > give_up:
            raise UnreadableDocument(
                f"the PDF takes too long: page {number} of {count} after "
                f"{_PDF_CPU_SECONDS:.0f} s of computing"
            )
        yield text


_WORD_XML: Final = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_FALLBACK: Final = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
_OLD_OFFICE: Final = b"\xd0\xcf\x11\xe0"


def _read_docx(file: io.BufferedReader) -> _Text:
    if file.read(4) == _OLD_OFFICE:
        raise UnreadableDocument("not a DOCX: it is encrypted, or an old .doc under a new name")
    file.seek(0)
    _check_archive(file)
    file.seek(0)
    import docx  # noqa: PLC0415 - 0.1 s
    from lxml import etree  # type: ignore[import-untyped]  # noqa: PLC0415

    try:
        document = docx.Document(file)
        body = document.element.body
        # The same text box is there twice, once for old readers.
        etree.strip_elements(body, _FALLBACK, with_tail=False)
        pieces = [
            (element.text or "") if element.tag == f"{_WORD_XML}t" else _DOCX_SPACE[element.tag]
            for element in body.iter(f"{_WORD_XML}t", *_DOCX_SPACE)
        ]
        title = document.core_properties.title or _docx_heading(body)
    except (UnreadableDocument, MemoryError):
        raise
    except zipfile.BadZipFile as error:
        raise UnreadableDocument("the DOCX archive is damaged") from error
    except Exception as error:  # python-docx raises KeyError, ValueError ... for parts not there
        raise UnreadableDocument(f"not a Word document inside ({type(error).__name__})") from error
    return _Text(title, "".join(pieces))


_DOCX_SPACE: Final = {
    f"{_WORD_XML}p": "\n",
    f"{_WORD_XML}br": "\n",
    f"{_WORD_XML}cr": "\n",
    f"{_WORD_XML}tab": "\t",
}


def _docx_heading(body: object) -> str:
    from docx.oxml.document import CT_Body  # noqa: PLC0415
    from docx.oxml.text.paragraph import CT_P  # noqa: PLC0415

    if isinstance(body, CT_Body):
        for paragraph in body.iterchildren(f"{_WORD_XML}p"):
            if isinstance(paragraph, CT_P) and paragraph.style in {"Title", "Heading1"}:
                return str(paragraph.text)
    return ""


def _check_archive(file: io.BufferedReader) -> None:
    # Trust in the directory is enough: zipfile stops at the size it states, then fails the CRC.
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise UnreadableDocument("the DOCX archive is damaged") from error
    if any(entry.flag_bits & 1 for entry in entries):
        raise UnreadableDocument("the DOCX archive is encrypted")
    unpacked = sum(entry.file_size for entry in entries)
    xml = sum(entry.file_size for entry in entries if entry.filename.endswith((".xml", ".rels")))
    if (
        len(entries) > _ENTRIES_LIMIT
        or unpacked > _UNPACKED_LIMIT_BYTES
        or xml > _UNPACKED_XML_LIMIT_BYTES
    ):
        raise UnreadableDocument(
            f"the DOCX unpacks to more than is read: {unpacked:,} bytes in {len(entries):,} parts"
        )


def _read_html(file: io.BufferedReader) -> _Text:
    return _html_text(_decode(file.read(), _declared_encoding))


_INVISIBLE: Final = ("script", "style", "template", "noscript", "svg", "math", "iframe", "object")
_BLOCKS: Final = frozenset(
    re.findall(
        r"\w+",
        "address article aside blockquote br caption dd details div dl dt fieldset figcaption"
        " figure footer form h1 h2 h3 h4 h5 h6 header hr legend li main nav ol option p pre"
        " section summary table td th tr ul",
    )
)


def _html_text(markup: str) -> _Text:
    # libxml2 and not a browser's parser: it stops at 256 levels, where selectolax takes two
    # minutes for a megabyte of <div>, and it lets other threads run meanwhile.
    from lxml import etree  # noqa: PLC0415

    parser = etree.HTMLParser(
        encoding="utf-8", remove_comments=True, remove_pis=True, no_network=True, huge_tree=False
    )
    try:
        root = etree.fromstring(markup.encode("utf-8", "replace"), parser)
    except (etree.ParserError, etree.XMLSyntaxError) as error:
        raise UnreadableDocument("no HTML found") from error
    if any(entry.type_name == "ERR_RESOURCE_LIMIT" for entry in parser.error_log):
        raise UnreadableDocument("the HTML is nested deeper than 256 levels, or has endless text")
    if root is None:
        return _Text("", "")
    etree.strip_elements(root, *_INVISIBLE, with_tail=False)
    title = _element_text(root.find(".//title")) or _element_text(root.find(".//h1"))
    etree.strip_elements(root, "title", with_tail=False)
    pieces: list[str] = []
    for event, element in etree.iterwalk(root, events=("start", "end")):
        space = "\n" if element.tag in _BLOCKS else ""
        pieces += (space, (element.text if event == "start" else element.tail) or "")
    return _Text(title, "".join(pieces))


class _Element(Protocol):
    def itertext(self) -> Iterator[str]: ...


def _element_text(element: _Element | None) -> str:
    return "" if element is None else "".join(element.itertext())


def _read_markdown(file: io.BufferedReader) -> _Text:
    return _markdown_text(_decode(file.read()))


_FRONT_MATTER: Final = re.compile(r"\A---[ \t]*\n(.{0,10000}?)\n---[ \t]*\n", re.DOTALL)
_FRONT_TITLE: Final = re.compile(r"^title:[ \t]*(.+)$", re.MULTILINE)


_MARKDOWN_LOCK: Final = threading.Lock()


@cache
def _markdown_is_warm() -> bool:
    # mdurl fills its tables of characters on first use, where other threads see them half full.
    from markdown_it import MarkdownIt  # noqa: PLC0415 - 0.1 s

    return bool(MarkdownIt("commonmark").render("[a](http://b/%20c) <http://b/%20c>"))


def _markdown_text(source: str) -> _Text:
    from markdown_it import MarkdownIt  # noqa: PLC0415

    with _MARKDOWN_LOCK:
        _markdown_is_warm()
    title = ""
    if front := _FRONT_MATTER.match(source):
        source = source[front.end() :]
        if named := _FRONT_TITLE.search(front[1]):
            title = named[1].strip().strip("\"'")
    # Through HTML, as readmes are half HTML anyway: badges, tables, centred logos.
    markup = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(source)
    text = _html_text(f"<div>{markup}</div>")
    return _Text(title or text.title, text.body)


def _read_rst(file: io.BufferedReader) -> _Text:
    return _rst_text(_decode(file.read()))


# docutils keeps roles and the default role in module globals while it reads one document.
_DOCUTILS: Final = threading.Lock()


def _rst_text(source: str) -> _Text:
    from docutils import nodes  # noqa: PLC0415 - 0.1 s
    from docutils.core import publish_doctree  # noqa: PLC0415
    from docutils.parsers.rst import Parser  # noqa: PLC0415
    from docutils.parsers.rst.states import Inliner  # noqa: PLC0415

    inliner = Inliner()
    parse = inliner.parse

    def parse_bounded(
        text: str, lineno: int, memo: SimpleNamespace, parent: nodes.Element
    ) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        if time.thread_time() > give_up:
            raise UnreadableDocument(
                f"the reStructuredText takes more than {_RST_CPU_SECONDS:.0f} s of computing"
            )
        # docutils is quadratic in the length of a paragraph: one nobody writes keeps its marks.
        if len(text) > _RST_PARAGRAPH_LIMIT:
            return [nodes.Text(text)], []
        return parse(text, lineno, memo, parent)

    # Not a subclass: Inliner reads its patterns out of its own class's dictionary.
    inliner.parse = parse_bounded  # type: ignore[method-assign]
    give_up = time.thread_time() + _RST_CPU_SECONDS
    try:
        with _DOCUTILS:
            tree = publish_doctree(
                source,
                parser=Parser(inliner=inliner),
                settings_overrides={
                    "_disable_config": True,
                    "file_insertion_enabled": False,
                    "raw_enabled": False,
                    "halt_level": 5,
                    "report_level": 5,
                    "line_length_limit": 1_000_000,
                    "syntax_highlight": "none",
                    "smart_quotes": False,
                },
            )
    except (UnreadableDocument, MemoryError):
        raise
    except Exception as error:  # docutils fails on some broken tables with an error of its own
        raise UnreadableDocument(f"the reStructuredText is broken ({type(error).__name__})") from (
            error
        )
    for kind in (nodes.system_message, nodes.comment, nodes.substitution_definition):
        for node in list(tree.findall(kind)):
            node.parent.remove(node)
    first = next(tree.findall(nodes.title), None)
    return _Text(first.astext() if first is not None else "", tree.astext())


def _read_text(file: io.BufferedReader) -> _Text:
    return _Text("", _decode(file.read()))


def _read_metadata(file: io.BufferedReader) -> _Text:
    # compat32 keeps a header it cannot parse, where newer policies raise.
    message = email.message_from_string(_decode(file.read()), policy=email.policy.compat32)
    if message["Name"] is None:
        raise UnreadableDocument("no package metadata: the Name header is missing")
    payload = message.get_payload()
    description = payload if isinstance(payload, str) else ""
    if not description.strip():
        folded = str(message["Description"] or "")
        description = re.sub(r"^ {7}[| ]", "", folded, flags=re.MULTILINE)
    content_type = str(message["Description-Content-Type"] or "text/x-rst").lower()
    body = _body_of(description, content_type.partition(";")[0].strip())
    summary = str(message["Summary"] or "")
    return _Text(f"{message['Name']} {message['Version'] or ''}".strip(), f"{summary}\n\n{body}")


def _body_of(description: str, content_type: str) -> str:
    match content_type:
        case "text/markdown":
            return _markdown_text(description).body
        case "text/plain":
            return description
        case _:
            return _rst_text(description).body


_READERS: Final[dict[MediaKind, Callable[[io.BufferedReader], _Text]]] = {
    MediaKind.PDF: _read_pdf,
    MediaKind.HTML: _read_html,
    MediaKind.MARKDOWN: _read_markdown,
    MediaKind.RST: _read_rst,
    MediaKind.TEXT: _read_text,
    MediaKind.DOCX: _read_docx,
    MediaKind.METADATA: _read_metadata,
}


# --- bytes to text ------------------------------------------------------------------------------

# The mark of UTF-32 begins with that of UTF-16: the longer ones first.
_BYTE_ORDER_MARKS: Final = (
    (b"\xef\xbb\xbf", "utf-8-sig"),
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_WIDE: Final = ["utf_16_le", "utf_16_be", "utf_32_le", "utf_32_be"]
# Short texts fit dozens of code pages; these are the ones people left files in.
_LEGACY: Final = [
    *("cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "koi8_r"),
    *("shift_jis", "euc_jp", "gb18030", "big5", "euc_kr"),
]
_DECLARED: Final = re.compile(
    rb"""(?:charset|encoding)\s{0,9}=\s{0,9}["']?([\w.:-]{1,40})""", re.IGNORECASE
)


def _declared_encoding(data: bytes) -> str | None:
    found = _DECLARED.search(data[:2048])
    return found[1].decode("ascii") if found else None


def _decode(data: bytes, declared: Callable[[bytes], str | None] = lambda _: None) -> str:
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return data.decode(encoding, "replace")
    if b"\x00" in data:
        return _decode_wide(data)
    for candidate in (declared(data), "utf-8"):
        if candidate is not None:
            try:
                return data.decode(candidate)
            except (UnicodeDecodeError, LookupError):
                continue
    return data.decode(_guessed_encoding(data), "replace")


def _decode_wide(data: bytes) -> str:
    from charset_normalizer import from_bytes  # noqa: PLC0415

    best = from_bytes(_even(data[:_ENCODING_SAMPLE_BYTES]), cp_isolation=_WIDE).best()
    text = "\x00" if best is None else data.decode(best.encoding, "replace")
    if "\x00" in text:
        raise UnreadableDocument("binary file, not text: it has NUL bytes")
    return text


def _even(data: bytes) -> bytes:
    return data[: len(data) // 4 * 4] if len(data) >= _ENCODING_SAMPLE_BYTES else data


def _guessed_encoding(data: bytes) -> str:
    from charset_normalizer import from_bytes  # noqa: PLC0415 - 0.05 s, most files are UTF-8

    matches = list(from_bytes(data[:_ENCODING_SAMPLE_BYTES], cp_isolation=_LEGACY))
    if not matches:
        raise UnreadableDocument("binary file, not text")
    best = matches[0]
    # Western and central European pages differ in few letters; where both fit as well, the
    # western one is by far the commoner, and the one browsers assume.
    equals = [m for m in matches if (m.chaos, m.coherence) == (best.chaos, best.coherence)]
    fitting = {name for match in equals for name in match.could_be_from_charset}
    return "cp1252" if "cp1252" in fitting else best.encoding


# --- text to facts ------------------------------------------------------------------------------

# Bounded on both sides: an open `\S+` before the sign is quadratic on a text without spaces.
_ADDRESSES: Final = re.compile(r"\b[a-z]{2,9}://[^\s<>\"]{1,2000}|[\w.+-]{1,64}@[\w.-]{1,255}")
_CONTROL: Final = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufeff]"
)


def _clean(text: str) -> str:
    return _CONTROL.sub("", text).strip()


def _first_line(body: str) -> str:
    lines = (line.strip(" \t#=*-_~.") for line in body[:4_000].splitlines())
    return next((line for line in lines if any(map(str.isalnum, line))), "")


def _title(text: str) -> str:
    return " ".join(_clean(text).split())[:TITLE_LIMIT].rstrip()


_WORD: Final = (
    r"[\p{Han}\p{Hiragana}\p{Katakana}]"
    r"|[\p{L}\p{N}][\p{L}\p{N}\p{M}]*+(?:['\u2019\-_][\p{L}\p{N}][\p{L}\p{N}\p{M}]*+)*+"
)
# Where a pair of words ends: punctuation, a sign, an empty line.
_BREAK: Final = r"\n\s*+\n|[^\s\p{L}\p{N}\p{M}]"


@cache
def _finder(pattern: str) -> Callable[[str], Iterator[re.Match[str]]]:
    # `re` knows no scripts, and takes the vowel signs of Hindi or Tamil for gaps between words.
    import regex  # type: ignore[import-untyped]  # noqa: PLC0415

    find: Callable[[str], Iterator[re.Match[str]]] = regex.compile(pattern).finditer
    return find


def _count_words(body: str) -> int:
    return sum(1 for _ in _finder(_WORD)(body))


_LANGUAGE_LOCK: Final = threading.Lock()
_CONFIDENCE: Final = 0.2


@cache
def _classifier() -> Callable[[str], tuple[str, float]]:
    from py3langid import langid  # type: ignore[import-untyped]  # noqa: PLC0415 - 0.8 s

    classify: Callable[[str], tuple[str, float]] = langid.LanguageIdentifier.from_model_file(
        langid.MODEL_FILE, norm_probs=True, min_confidence=_CONFIDENCE
    ).classify
    return classify


def _language(prose: str) -> str:
    with _LANGUAGE_LOCK:  # two threads would load the model twice, 100 MB each for a moment
        classify = _classifier()
    code, _ = classify(_sample(prose))
    return "und" if code == "zxx" else code


def _sample(prose: str) -> str:
    # From four places: the head of a file is often badges, or a licence in another language.
    if len(prose) <= _LANGUAGE_SAMPLE:
        return prose
    size, step = _LANGUAGE_SAMPLE // 4, (len(prose) - _LANGUAGE_SAMPLE // 4) // 3
    return "\n".join(prose[start * step : start * step + size] for start in range(4))


@cache
def _stop_words(language: str) -> frozenset[str]:
    from stop_words import safe_get_stop_words  # type: ignore[import-untyped]  # noqa: PLC0415

    return frozenset((*safe_get_stop_words(language), *safe_get_stop_words("en")))


def _key_terms(prose: str, language: str) -> tuple[str, ...]:
    """Rank words, and pairs that stand side by side again and again, by how often they come.

    A ranking of its own for want of a kind one: yake takes 26 ms for 4,000 characters and brings
    networkx, RAKE wants data fetched at run time, the rest want a neural network.
    """
    singles, pairs, surface = Counter[str](), Counter[tuple[str, str]](), Counter[str]()
    previous, stop_words = "", _stop_words(language)
    for match in _finder(f"{_WORD}|{_BREAK}")(prose):
        token = match[0]
        folded = _folded(token)
        if folded in stop_words or not token[0].isalpha():
            previous = ""
            continue
        surface[token] += 1
        singles[folded] += 1
        if previous:
            pairs[previous, folded] += 1
        previous = folded
    # Each word is shown as the text spells it most often.
    spellings = {_folded(token): token for token, _ in reversed(surface.most_common())}
    return _ranked_terms(singles, pairs, spellings)


def _folded(token: str) -> str:
    return token.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")


def _ranked_terms(
    singles: Counter[str], pairs: Counter[tuple[str, str]], spellings: dict[str, str]
) -> tuple[str, ...]:
    scored: list[tuple[float, str]] = []
    within = Counter[str]()
    for (first, second), count in pairs.items():
        if count > 1 and first != second:
            glue = "" if _is_ideograph(first) and _is_ideograph(second) else " "
            scored.append((1.5 * count, f"{spellings[first]}{glue}{spellings[second]}"))
            for word in (first, second):
                within[word] = max(within[word], count)
    # A word that mostly comes in its pair would say the same again.
    scored += (
        (count, spellings[word])
        for word, count in singles.items()
        if len(word) in _TERM_LENGTH and count > 1.5 * within[word]
    )
    best = sorted(scored, key=lambda item: -item[0])
    return tuple(term for _, term in best if len(term) in _TERM_LENGTH or _is_ideograph(term))[
        :KEY_TERMS
    ]


def _is_ideograph(word: str) -> bool:
    return unicodedata.name(word[0], "").startswith(("CJK", "HIRAGANA", "KATAKANA"))
