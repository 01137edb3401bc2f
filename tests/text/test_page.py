import re
from html.parser import HTMLParser

import pytest

from nanolm.text import spelled
from nanolm.text.page import prediction, prediction_legend, surprise_page, tokens_page
from nanolm.text.tokenizer import train_tokenizer

TEXT = "<script>alert(1)</script> & \"quotes\" 'here'\n\tzwölf 日本 \x1b[31m \0\x7f\x9b\u202eevil"
# How invisible characters are shown.
BLANK = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥"})
VISIBLE = str.maketrans(
    {"\x1b": "␛", "\0": "␀", "\x7f": r"\u007f", "\x9b": r"\u009b", "\u202e": r"\u202e"}
)


class Reader(HTMLParser):
    """The tags, the tooltips and the text of the tokens, as a browser would see them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.titles: list[str] = []
        self.classes: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page.partition("</p>")[2] or page)  # after the legend

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open.append(tag)
        if tag == "span":
            values = dict(attributes)
            self.titles.append(values.get("title") or "")
            self.classes.append(values["class"] or "")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("span", "i"):
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            self.open.pop()


def check_harmless(page: str) -> None:
    assert not {"script", "b", "img", "link", "a"} & set(re.findall(r"<(\w+)", page))
    assert "default-src 'none'; style-src 'sha256-" in page
    assert "http" not in page.replace("http-equiv", "")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", page)


@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
def test_the_page_shows_the_text_and_runs_nothing(kind: str) -> None:
    tokenizer = train_tokenizer([TEXT], kind)
    page = tokens_page(tokenizer, TEXT, "<b>name</b>")
    check_harmless(page)
    assert "\t" not in page
    if kind == "char":
        assert Reader(page).text == TEXT.translate(VISIBLE | BLANK)
    ids = re.findall(r"<small>(\d+)</small>", page)
    assert list(map(int, ids)) == tokenizer.encode(TEXT)


def test_no_text_at_all() -> None:
    assert "0 tokens" in tokens_page(train_tokenizer([], "byte"), "")


@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
def test_surprise_is_shown_in_running_text(kind: str) -> None:
    tokenizer = train_tokenizer(["the cat. " * 9], kind)
    ids = [*tokenizer.encode(TEXT), tokenizer.start_of_text, *tokenizer.encode("the cat\n")]
    tokens = [(id, float(number), number + 1) for number, id in enumerate(ids)]
    page = surprise_page(tokenizer, tokens, {"loss": "<b>1</b>"}, "<b>name</b>")
    check_harmless(page)
    assert "<h1>&lt;b&gt;name&lt;/b&gt;</h1>" in page
    assert "<dt>loss</dt><dd>&lt;b&gt;1&lt;/b&gt;</dd>" in page
    reader = Reader(page)
    # Characters are complete, even if their bytes are several tokens, and line ends are kept.
    assert reader.text == (TEXT + "the cat\n").translate(VISIBLE).replace("\n", "⏎\n")
    assert reader.tags.count("hr") == 1  # between the documents
    hints = "\n".join(reader.titles).split("\n")
    assert [hint.partition("  p = ")[0] for hint in hints] == [
        spelled(tokenizer.tokens[id]).translate(VISIBLE | BLANK)
        for id in ids
        if id != tokenizer.start_of_text
    ]
    assert hints[3].endswith("  p = 0.125  3.00 bits  rank 4")
    if kind == "byte":
        together = next(title for title in reader.titles if title.startswith(r"\xe6"))
        assert [line[:4] for line in together.split("\n")] == [r"\xe6", r"\x97", r"\xa5"]


def test_colors_follow_the_bits() -> None:
    tokenizer = train_tokenizer([], "byte")
    bits = [0, 0.5, 0.6, 2, 4, 4.1, 8, 12, 12.1, 1e9, float("nan")]
    page = surprise_page(tokenizer, [(97, value, 1) for value in bits], {}, "text")
    steps = [int(name[1:]) for name in Reader(page).classes]
    assert steps == [0, 0, 1, 2, 3, 4, 5, 6, 7, 7, 7]
    style, legend = page.partition("</style>")[::2]
    for step in range(1, 8):
        assert f".s{step} {{ background: light-dark(#" in style
        assert f'<span class="s{step}">' in legend.partition("</p>")[0]


@pytest.mark.parametrize(
    ("probability", "came", "cell"),
    [
        (0.95, False, '<td class="p5">a <small>0.950</small></td>'),
        (0.01, True, '<td class="p1 came">a <small>0.010</small></td>'),
        (
            0.002,
            False,
            '<td class="p0">a <small>0.002</small></td>',
        ),  # unlikely, but it did not come
        (0.0009, True, '<td class="unlikely came">a <small>&lt;0.001</small></td>'),
    ],
)
def test_only_an_unlikely_token_that_came_is_red(probability: float, came: bool, cell: str) -> None:
    assert prediction("a", probability, came) == cell


def test_the_legend_names_each_shade() -> None:
    legend, page = prediction_legend(), surprise_page(train_tokenizer([], "byte"), [], {}, "text")
    for step, bound in enumerate(["lower", "≥ 0.01", "≥ 0.05", "≥ 0.2", "≥ 0.5", "≥ 0.9"]):
        assert f'<span class="p{step}">{bound}</span>' in legend
        assert not step or f".p{step} {{ background" in page
    assert "below 0.01" in legend and ".unlikely {" in page
    assert "unlikely" not in prediction_legend(actual="")


def test_a_text_that_ends_amid_a_character() -> None:
    tokenizer = train_tokenizer([], "byte")
    end = (tokenizer.start_of_text, 0.0, 1)
    page = surprise_page(
        tokenizer, [(0xE6, 1.0, 1), end, (0xE6, 1.0, 1), (0x97, 1.0, 1)], {}, "text"
    )
    assert Reader(page).text == r"\xe6\xe6\x97"
    assert page.index("\\xe6</span><hr>")
