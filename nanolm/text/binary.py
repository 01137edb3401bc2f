"""Files that are not text, known by how they begin, each with what to do instead.

>>> binary_format(b"%PDF-1.7 ...", "thesis.pdf").name
'PDF document'
"""

import re
from dataclasses import dataclass

PLAIN = "open it and save it as plain text"
UNPACK = "unpack it and name the folder"
NO_TEXT = "there is no text in it to read"


@dataclass(frozen=True)
class Format:
    name: str
    cure: str


# What a file begins with; "?" is any byte.
MAGIC = {
    b"%PDF-": Format("PDF document", "convert it first: pdftotext {stem}.pdf {stem}.txt"),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": Format("Microsoft Office document", PLAIN),
    b"PAR1": Format("Parquet table", "rename it to {stem}.parquet"),
    b"ARROW1\0\0": Format("Arrow table", "rename it to {stem}.arrow"),
    b"SQLite format 3\0": Format("SQLite database", "export the column of texts as CSV"),
    b"7z\xbc\xaf\x27\x1c": Format("7z archive", UNPACK),
    b"Rar!\x1a\x07": Format("RAR archive", UNPACK),
    b"\x89PNG\r\n\x1a\n": Format("PNG picture", NO_TEXT),
    b"\xff\xd8\xff": Format("JPEG picture", NO_TEXT),
    b"GIF87a": Format("GIF picture", NO_TEXT),
    b"GIF89a": Format("GIF picture", NO_TEXT),
    b"II*\0": Format("TIFF picture", NO_TEXT),
    b"MM\0*": Format("TIFF picture", NO_TEXT),
    b"RIFF????WEBP": Format("WebP picture", NO_TEXT),
    b"RIFF????WAVE": Format("WAV recording", NO_TEXT),
    b"RIFF????AVI ": Format("AVI video", NO_TEXT),
    b"\0\0\0?ftyp": Format("MPEG-4 video", NO_TEXT),
    b"\x1aE\xdf\xa3": Format("Matroska video", NO_TEXT),
    b"OggS\0": Format("Ogg recording", NO_TEXT),
    b"fLaC": Format("FLAC recording", NO_TEXT),
    b"ID3\x02": Format("MP3 recording", NO_TEXT),
    b"ID3\x03": Format("MP3 recording", NO_TEXT),
    b"ID3\x04": Format("MP3 recording", NO_TEXT),
    b"\x7fELF": Format("program", NO_TEXT),
    b"MZ?\0": Format("Windows program", NO_TEXT),
    b"\xcf\xfa\xed\xfe": Format("macOS program", NO_TEXT),
    b"\xca\xfe\xba\xbe": Format("Java class or macOS program", NO_TEXT),
    b"\0asm": Format("WebAssembly program", NO_TEXT),
    b"GGUF": Format("GGUF model", NO_TEXT),
}
PANDOC = "or convert it: pandoc {stem}.{kind} -t plain -o {stem}.txt"
ZIPPED = {  # by a name that is in such an archive near its beginning
    b"application/epub+zip": Format("EPUB book", f"{PLAIN}, {PANDOC}".replace("{kind}", "epub")),
    b"application/vnd.oasis.opendocument.text": Format(
        "OpenDocument text", f"{PLAIN}, {PANDOC}".replace("{kind}", "odt")
    ),
    b"application/vnd.oasis.opendocument": Format("OpenDocument file", "save it as text or CSV"),
    b"word/": Format("Word document", f"{PLAIN}, {PANDOC}".replace("{kind}", "docx")),
    b"xl/": Format("Excel workbook", "save it as CSV"),
    b"ppt/": Format("PowerPoint presentation", PLAIN),
}
OFFICE = {".docx": b"word/", ".xlsx": b"xl/", ".pptx": b"ppt/"}  # where the names come later
ZIP = (b"PK\x03\x04", b"PK\x05\x06")
PATTERNS = [
    (re.compile(re.escape(start).replace(rb"\?", b"."), re.DOTALL), found)
    for start, found in MAGIC.items()
]
TAR = 257  # where a tar archive says that it is one

# Characters that no text has many of. Escape codes and form feeds are not among them: logs and
# pages have those.
CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
LEAST, SHARE = 32, 0.05  # of them: fewer are dirt in a text


def binary_format(start: bytes, name: str) -> Format | None:
    """What a file is whose first bytes are `start`, if it is known and not text."""
    known = next((found for pattern, found in PATTERNS if pattern.match(start)), None)
    if known is None and start.startswith(ZIP):
        known = Format("ZIP archive", UNPACK)
        suffix = name.lower()[name.rfind(".") :] if "." in name else ""
        for inside, found in ZIPPED.items():
            if inside in start or OFFICE.get(suffix) == inside:
                known = found
                break
    elif known is None and start[TAR : TAR + 5] == b"ustar":
        known = Format("tar archive", UNPACK)
    if known is None:
        return None
    stem = name.rpartition(".")[0] or name
    return Format(known.name, known.cure.format(stem=stem))


def looks_binary(text: str) -> bool:
    """Whether what was decoded is bytes of something else."""
    found = len(CONTROL.findall(text))
    return found >= LEAST and found > SHARE * len(text)
