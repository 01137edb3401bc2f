"""Files that are not text, known by how they begin, each with what to do instead.

>>> binary_format(b"%PDF-1.7 ...", "thesis.pdf").name
'PDF document'
"""

import re
from dataclasses import dataclass

PLAIN = "open it and save it as plain text"
SAVE_AS_TEXT = "save it as text or CSV"
UNPACK = "unpack it and name the folder"
NO_TEXT = "there is no text in it to read"


@dataclass(frozen=True)
class BinaryFormat:
    name: str
    cure: str


# What a file begins with; "?" is any byte.
SIGNATURES = {
    b"%PDF-": BinaryFormat("PDF document", "convert it first: pdftotext {stem}.pdf {stem}.txt"),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": BinaryFormat("Microsoft Office document", PLAIN),
    b"PAR1": BinaryFormat("Parquet table", "rename it to {stem}.parquet"),
    b"ARROW1\0\0": BinaryFormat("Arrow table", "rename it to {stem}.arrow"),
    b"SQLite format 3\0": BinaryFormat("SQLite database", "export the column of texts as CSV"),
    b"7z\xbc\xaf\x27\x1c": BinaryFormat("7z archive", UNPACK),
    b"Rar!\x1a\x07": BinaryFormat("RAR archive", UNPACK),
}
NO_TEXT_SIGNATURES = {
    "PNG picture": (b"\x89PNG\r\n\x1a\n",),
    "JPEG picture": (b"\xff\xd8\xff",),
    "GIF picture": (b"GIF87a", b"GIF89a"),
    "TIFF picture": (b"II*\0", b"MM\0*"),
    "WebP picture": (b"RIFF????WEBP",),
    "WAV recording": (b"RIFF????WAVE",),
    "AVI video": (b"RIFF????AVI ",),
    "MPEG-4 video": (b"\0\0\0?ftyp",),
    "Matroska video": (b"\x1aE\xdf\xa3",),
    "Ogg recording": (b"OggS\0",),
    "FLAC recording": (b"fLaC",),
    "MP3 recording": (b"ID3\x02", b"ID3\x03", b"ID3\x04"),
    "program": (b"\x7fELF",),
    "Windows program": (b"MZ?\0",),
    "macOS program": (b"\xcf\xfa\xed\xfe",),
    "Java class or macOS program": (b"\xca\xfe\xba\xbe",),
    "WebAssembly program": (b"\0asm",),
    "GGUF model": (b"GGUF",),
}
SIGNATURES |= {
    start: BinaryFormat(name, NO_TEXT)
    for name, starts in NO_TEXT_SIGNATURES.items()
    for start in starts
}
PANDOC = PLAIN + ", or convert it: pandoc {stem}.%s -t plain -o {stem}.txt"
ZIPPED = {  # by a name that is in such an archive near its beginning
    b"application/epub+zip": BinaryFormat("EPUB book", PANDOC % "epub"),
    b"application/vnd.oasis.opendocument.text": BinaryFormat("OpenDocument text", PANDOC % "odt"),
    b"application/vnd.oasis.opendocument": BinaryFormat(
        "OpenDocument file", "save it as text or CSV"
    ),
    b"word/": BinaryFormat("Word document", PANDOC % "docx"),
    b"xl/": BinaryFormat("Excel workbook", "save it as CSV"),
    b"ppt/": BinaryFormat("PowerPoint presentation", PLAIN),
}
OFFICE = {".docx": b"word/", ".xlsx": b"xl/", ".pptx": b"ppt/"}  # where the names come later
ZIP = (b"PK\x03\x04", b"PK\x05\x06")
SIGNATURE_PATTERNS = [
    (re.compile(re.escape(start).replace(rb"\?", b"."), re.DOTALL), known)
    for start, known in SIGNATURES.items()
]
TAR_OFFSET = 257  # where a tar archive says that it is one

# Characters that no text has many of. Escape codes and form feeds are not among them: logs and
# pages have those.
CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
LEAST_CONTROL, CONTROL_SHARE = 32, 0.05  # fewer of them are dirt in a text


def binary_format(start: bytes, name: str) -> BinaryFormat | None:
    """What a file is whose first bytes are `start`, if it is known and not text."""
    known = next((known for pattern, known in SIGNATURE_PATTERNS if pattern.match(start)), None)
    if known is None and start.startswith(ZIP):
        suffix = name.lower()[name.rfind(".") :] if "." in name else ""
        inside = (name for name in ZIPPED if name in start or OFFICE.get(suffix) == name)
        known = ZIPPED.get(next(inside, b""), BinaryFormat("ZIP archive", UNPACK))
    elif known is None and start[TAR_OFFSET : TAR_OFFSET + 5] == b"ustar":
        known = BinaryFormat("tar archive", UNPACK)
    if known is None:
        return None
    stem = name.rpartition(".")[0] or name
    return BinaryFormat(known.name, known.cure.format(stem=stem))


def looks_binary(text: str) -> bool:
    """Whether what was decoded is bytes of something else."""
    count = len(CONTROL.findall(text))
    return count >= LEAST_CONTROL and count > CONTROL_SHARE * len(text)
