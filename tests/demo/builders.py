"""Small real files, built where a test needs them."""

import io
import zipfile
from collections.abc import Iterable
from pathlib import Path

import docx
import pypdf


def pdf_bytes(texts: Iterable[str], *, title: str = "") -> bytes:
    """A valid PDF with a line of text a page, written out by hand."""
    pages = list(texts)
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>"
        % (b" ".join(b"%d 0 R" % (5 + 2 * index) for index in range(len(pages))), len(pages)),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        b"<< /Title (%s) >>" % title.encode("latin-1"),
    ]
    for index, text in enumerate(pages):
        drawing = b"BT /F1 12 Tf 72 720 Td (%s) Tj ET" % text.encode("latin-1") if text else b""
        objects += [
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R"
            b" /Resources << /Font << /F1 3 0 R >> >> >>" % (6 + 2 * index),
            b"<< /Length %d >>\nstream\n%s\nendstream" % (len(drawing), drawing),
        ]
    out, places = io.BytesIO(b""), []
    out.write(b"%PDF-1.4\n")
    for number, content in enumerate(objects, start=1):
        places.append(out.tell())
        out.write(b"%d 0 obj\n%s\nendobj\n" % (number, content))
    table = out.tell()
    out.write(b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1))
    out.writelines(b"%010d 00000 n \n" % place for place in places)
    out.write(
        b"trailer\n<< /Size %d /Root 1 0 R /Info 4 0 R >>\nstartxref\n%d\n%%%%EOF\n"
        % (len(objects) + 1, table)
    )
    return out.getvalue()


def encrypted_pdf(path: Path, *, user_password: str) -> Path:
    """A PDF locked with a password; an empty one locks it against changes only."""
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(pdf_bytes(["Secret words on a page"])))
    writer.encrypt(user_password, owner_password="owner", algorithm="RC4-128")  # noqa: S106
    writer.write(path)
    return path


def docx_file(path: Path, *, heading: str, paragraphs: Iterable[str]) -> Path:
    """A Word document with a title, paragraphs, and a table of one row."""
    document = docx.Document()
    document.core_properties.title = ""
    document.add_heading(heading, level=0)
    for paragraph in paragraphs:
        document.add_paragraph(paragraph)
    cells = document.add_table(rows=1, cols=2).rows[0].cells
    cells[0].text, cells[1].text = "left", "right"
    document.save(str(path))
    return path


def repacked(path: Path, extra: dict[str, bytes]) -> Path:
    """The same archive with more parts, compressed."""
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        for name, content in extra.items():
            archive.writestr(name, content)
    return path
