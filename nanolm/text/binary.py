"""Recognize files that are not text by their first bytes, each with what to do instead.

>>> binary_format(b"%PDF-1.7 ...", "thesis.pdf").name
'PDF document'
"""

import re
from typing import NamedTuple

PLAIN = "open it and save it as plain text"
UNPACK = "extract it and pass the folder"
NO_TEXT = "it contains no text to read"
PANDOC = PLAIN + ", or convert it: pandoc {stem}.%s -t plain -o {stem}.txt"


class BinaryFormat(NamedTuple):
    name: str
    cure: str


# The first bytes of a file; "?" is any byte.
SIGNATURES = {
    b"%PDF-": ("PDF document", "convert it first: pdftotext {stem}.pdf {stem}.txt"),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("Microsoft Office document", PLAIN),
    b"PAR1": ("Parquet table", "rename it to {stem}.parquet"),
    b"ARROW1\0\0": ("Arrow table", "rename it to {stem}.arrow"),
    b"SQLite format 3\0": ("SQLite database", "export the text column as CSV"),
    b"7z\xbc\xaf\x27\x1c": ("7z archive", UNPACK),
    b"Rar!\x1a\x07": ("RAR archive", UNPACK),
    b"\x89PNG\r\n\x1a\n": ("PNG image", NO_TEXT),
    b"\xff\xd8\xff": ("JPEG image", NO_TEXT),
    **dict.fromkeys((b"GIF87a", b"GIF89a"), ("GIF image", NO_TEXT)),
    **dict.fromkeys((b"II*\0", b"MM\0*"), ("TIFF image", NO_TEXT)),
    b"RIFF????WEBP": ("WebP image", NO_TEXT),
    b"RIFF????WAVE": ("WAV audio", NO_TEXT),
    b"RIFF????AVI ": ("AVI video", NO_TEXT),
    b"\0\0\0?ftyp": ("MPEG-4 video", NO_TEXT),
    b"\x1aE\xdf\xa3": ("Matroska video", NO_TEXT),
    b"OggS\0": ("Ogg audio", NO_TEXT),
    b"fLaC": ("FLAC audio", NO_TEXT),
    **dict.fromkeys((b"ID3\x02", b"ID3\x03", b"ID3\x04"), ("MP3 audio", NO_TEXT)),
    b"\x7fELF": ("executable", NO_TEXT),
    b"MZ?\0": ("Windows executable", NO_TEXT),
    b"\xcf\xfa\xed\xfe": ("macOS executable", NO_TEXT),
    b"\xca\xfe\xba\xbe": ("Java class or macOS executable", NO_TEXT),
    b"\0asm": ("WebAssembly module", NO_TEXT),
    b"GGUF": ("GGUF model", NO_TEXT),
}
SIGNATURE_PATTERNS = [
    (re.compile(re.escape(start).replace(rb"\?", b"."), re.DOTALL), known)
    for start, known in SIGNATURES.items()
]
ZIPPED = {  # by a file name near the beginning of the archive
    b"application/epub+zip": ("EPUB book", PANDOC % "epub"),
    b"application/vnd.oasis.opendocument.text": ("OpenDocument text", PANDOC % "odt"),
    b"application/vnd.oasis.opendocument": ("OpenDocument file", "save it as text or CSV"),
    b"word/": ("Word document", PANDOC % "docx"),
    b"xl/": ("Excel workbook", "save it as CSV"),
    b"ppt/": ("PowerPoint presentation", PLAIN),
}
OFFICE = {".docx": b"word/", ".xlsx": b"xl/", ".pptx": b"ppt/"}  # if the names come later
ZIP = (b"PK\x03\x04", b"PK\x05\x06")
TAR_OFFSET = 257  # of the magic bytes of a tar archive

# Control characters that are rare in text. Escape codes and form feeds do not count, because logs
# and page breaks contain them.
CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
LEAST_CONTROL, CONTROL_SHARE = 32, 0.05  # with fewer, it is still text


def binary_format(start: bytes, name: str) -> BinaryFormat | None:
    """The format of a file whose first bytes are `start`, if it is a known binary format."""
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
    """Whether the decoded text is in fact binary data."""
    count = len(CONTROL.findall(text))
    return count >= LEAST_CONTROL and count > CONTROL_SHARE * len(text)
