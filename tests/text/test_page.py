import re
from html.parser import HTMLParser

import pytest

from nanolm.text.page import tokens_page
from nanolm.text.tokenizer import train_tokenizer

TEXT = "<script>alert(1)</script> & \"quotes\" 'here'\n\tzwölf 日本 \x1b[31m \0"


class Reader(HTMLParser):
    """The tags and the text of the tokens, as a browser would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.inside = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.inside = tag in ("span", "i") if tag != "small" else False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        self.inside = tag == "i"


@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
def test_the_page_shows_the_text_and_runs_nothing(kind: str) -> None:
    tokenizer = train_tokenizer([TEXT], kind)
    page = tokens_page(tokenizer, TEXT, "<b>name</b>")
    reader = Reader()
    reader.feed(page)
    assert not {"script", "b", "img", "link"} & reader.tags
    assert "default-src 'none'; style-src 'sha256-" in page
    assert "http" not in page.replace("http-equiv", "")
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", page)
    if kind == "char":
        shown = TEXT.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥")
        assert reader.text == shown.replace("\x1b", "␛").replace("\0", "␀")
    ids = re.findall(r"<small>(\d+)</small>", page)
    assert list(map(int, ids)) == tokenizer.encode(TEXT)


def test_no_text_at_all() -> None:
    assert "0 tokens" in tokens_page(train_tokenizer([], "byte"), "")
