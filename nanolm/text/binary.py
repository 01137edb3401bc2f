"""Files that are not text, known by how they begin, each with what to do instead.

>>> binary_format(b"%PDF-1.7 ...", "thesis.pdf").name
'PDF document'
"""

import re
from typing import NamedTuple

PLAIN = "open it and save it as plain text"
UNPACK = "unpack it and name the folder"
NO_TEXT = "there is no text in it to read"
PANDOC = PLAIN + ", or convert it: pandoc {stem}.%s -t plain -o {stem}.txt"


class BinaryFormat(NamedTuple):
    name: str
    cure: str


# What a file begins with; "?" is any byte.
SIGNATURES = {
    b"%PDF-": ("PDF document", "convert it first: pdftotext {stem}.pdf {stem}.txt"),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("Microsoft Office document", PLAIN),
    b"PAR1": ("Parquet table", "rename it to {stem}.parquet"),
    b"ARROW1\0\0": ("Arrow table", "rename it to {stem}.arrow"),
    b"SQLite format 3\0": ("SQLite database", "export the column of texts as CSV"),
    b"7z\xbc\xaf\x27\x1c": ("7z archive", UNPACK),
    b"Rar!\x1a\x07": ("RAR archive", UNPACK),
    b"\x89PNG\r\n\x1a\n": ("PNG picture", NO_TEXT),
    b"\xff\xd8\xff": ("JPEG picture", NO_TEXT),
    **dict.fromkeys((b"GIF87a", b"GIF89a"), ("GIF picture", NO_TEXT)),
    **dict.fromkeys((b"II*\0", b"MM\0*"), ("TIFF picture", NO_TEXT)),
    b"RIFF????WEBP": ("WebP picture", NO_TEXT),
    b"RIFF????WAVE": ("WAV recording", NO_TEXT),
    b"RIFF????AVI ": ("AVI video", NO_TEXT),
    b"\0\0\0?ftyp": ("MPEG-4 video", NO_TEXT),
    b"\x1aE\xdf\xa3": ("Matroska video", NO_TEXT),
    b"OggS\0": ("Ogg recording", NO_TEXT),
    b"fLaC": ("FLAC recording", NO_TEXT),
    **dict.fromkeys((b"ID3\x02", b"ID3\x03", b"ID3\x04"), ("MP3 recording", NO_TEXT)),
    b"\x7fELF": ("program", NO_TEXT),
    b"MZ?\0": ("Windows program", NO_TEXT),
    b"\xcf\xfa\xed\xfe": ("macOS program", NO_TEXT),
    b"\xca\xfe\xba\xbe": ("Java class or macOS program", NO_TEXT),
    b"\0asm": ("WebAssembly program", NO_TEXT),
    b"GGUF": ("GGUF model", NO_TEXT),
}
SIGNATURE_PATTERNS = [
    (re.compile(re.escape(start).replace(rb"\?", b"."), re.DOTALL), known)
    for start, known in SIGNATURES.items()
]
ZIPPED = {  # by a name that is in such an archive near its beginning
    b"application/epub+zip": ("EPUB book", PANDOC % "epub"),
    b"application/vnd.oasis.opendocument.text": ("OpenDocument text", PANDOC % "odt"),
    b"application/vnd.oasis.opendocument": ("OpenDocument file", "save it as text or CSV"),
    b"word/": ("Word document", PANDOC % "docx"),
    b"xl/": ("Excel workbook", "save it as CSV"),
    b"ppt/": ("PowerPoint presentation", PLAIN),
}
OFFICE = {".docx": b"word/", ".xlsx": b"xl/", ".pptx": b"ppt/"}  # where the names come later
ZIP = (b"PK\x03\x04", b"PK\x05\x06")
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
        known = ZIPPED.get(next(inside, b""), ("ZIP archive", UNPACK))
    elif known is None and start[TAR_OFFSET : TAR_OFFSET + 5] == b"ustar":
        known = ("tar archive", UNPACK)
    if known is None:
        return None
    return BinaryFormat(known[0], known[1].format(stem=name.rpartition(".")[0] or name))


def looks_binary(text: str) -> bool:
    """Whether what was decoded is bytes of something else."""
    count = len(CONTROL.findall(text))
    return count >= LEAST_CONTROL and count > CONTROL_SHARE * len(text)
