"""The embedded data: made by its generator, and what it is said to be."""

import importlib.util
import math
import re
import subprocess
import sys
from collections import Counter, defaultdict
from datetime import date, timedelta
from pathlib import Path
from types import ModuleType

import pytest
from conftest import Cli

import nanolm

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DATA / "generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generator_makes_these_bytes(tmp_path: Path) -> None:
    script = [sys.executable, str(DATA / "generate.py")]
    assert subprocess.run([*script, "--check"]).returncode == 0
    assert subprocess.run([*script, "--out", str(tmp_path)]).returncode == 0
    (tmp_path / "tiny.txt").write_text("changed")
    found = subprocess.run([*script, "--check", "--out", str(tmp_path)], capture_output=True)
    assert found.returncode == 1
    assert b"tiny.txt" in found.stdout + found.stderr


def test_tiny(generator: ModuleType) -> None:
    text = (DATA / "tiny.txt").read_text()
    assert 4_500 < len(text) < 5_500
    assert len(set(text.replace(".", "").split())) == 12
    assert all(generator.tiny_allows(line) for line in text.splitlines())
    assert not generator.tiny_allows("the sees cat.")
    assert generator.tiny_allows_prefix("the cat sees")
    assert not generator.tiny_allows_prefix("the sees")


def test_the_entropy_of_the_grammar(generator: ModuleType) -> None:
    dice = generator.Dice(5)
    drawn = Counter(generator.tiny_sentence(dice) for _ in range(60_000))
    estimate = -sum(n / 60_000 * math.log(n / 60_000) for n in drawn.values())
    assert generator.tiny_entropy() == pytest.approx(estimate, abs=0.03)


def test_stories() -> None:
    stories = (DATA / "stories.txt").read_text().split("\n***\n")
    assert 900_000 < sum(map(len, stories)) < 1_100_000
    assert len(set(stories)) == len(stories) > 500
    assert all('"' in story for story in stories)


def test_in_the_reviews_only_word_order_decides() -> None:
    rows = [line.split("\t") for line in (DATA / "reviews.tsv").read_text().splitlines()]
    assert rows.pop(0) == ["text", "label"]
    assert len(rows) >= 4_000
    assert len({text for text, _ in rows}) == len(rows)
    words: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for text, label in rows:
        words[" ".join(sorted(re.findall(r"[a-z']+", text.lower())))][label] += 1
    # The same words, equally often good and bad: counting them tells nothing.
    assert all(labels["negative"] == labels["positive"] for labels in words.values())


def test_a_spelling_means_one_date(generator: ModuleType) -> None:
    rows = generator.read_pairs_table((DATA / "dates.tsv").read_text())
    assert len(rows) == len({spelling for spelling, _ in rows}) == 10_000
    known = {iso for _, iso in rows}
    assert len(known) == 5_000
    assert all("1900-01-01" <= iso <= "2099-12-31" for iso in known)
    spelled: defaultdict[str, set[str]] = defaultdict(set)
    for days in range(0, 73_000, 37):
        day = date(1900, 1, 1) + timedelta(days)
        for form in generator.SPELLINGS:
            if "{yy" not in form or 1930 <= day.year < 2030:
                spelled[generator.spell_date(day, form)].add(day.isoformat())
    assert len(spelled) > 40_000
    assert {len(dates) for dates in spelled.values()} == {1}
    fresh = generator.fresh_dates(20, seed=6)
    assert len(fresh) == 40
    assert not known.intersection(iso for _, iso in fresh)


@pytest.mark.parametrize(
    ("spelling", "shown"),
    [
        ("{weekday} the {nth} of {month} {y}", "Sunday the 3rd of May 1998"),
        ("the {ordinal} of {month}, {year}", "the third of May, nineteen ninety-eight"),
        ("{d} {roman} {y}", "3 V 1998"),
        ("{m:02}/{d:02}/{y}", "05/03/1998"),
        ("{d}.{m}.{yy:02}", "3.5.98"),
    ],
)
def test_spellings(generator: ModuleType, spelling: str, shown: str) -> None:
    assert generator.spell_date(date(1998, 5, 3), spelling) == shown


def test_years_in_words(generator: ModuleType) -> None:
    words = [generator.year_in_words(year) for year in (1900, 1905, 1920, 2000, 2004, 2010, 2031)]
    assert words == [
        "nineteen hundred",
        "nineteen oh five",
        "nineteen twenty",
        "two thousand",
        "two thousand and four",
        "twenty ten",
        "twenty thirty-one",
    ]


@pytest.mark.parametrize(
    ("english", "veltish"),
    [
        ("the king loves the dog.", "al rega al koram ame."),
        ("these kings will not love a dog.", "hani regani koram ne amiren."),
        ("did two old cats sleep in my house?", "misu vetu dvo min domal dormaden ku?"),
        # what belongs to a noun comes before it, and agrees with it
        (
            "the king loves the old dog that saw two cats.",
            "al rega misum dvo sevadantam al koram vetam ame.",
        ),
        ("the dog that the cat saw sleeps.", "al misus sevadota al kora dorme."),
        ("the dog of my king ran.", "min regas al kora kurade."),
        # a phrase belongs to the nearest verb
        (
            "the king sees the dog that sleeps under the bridge.",
            "al rega al pontas sub dormantam al koram seve.",
        ),
        # the reason comes first
        ("today the girl sings because a boy ran.", "batu kurade da, al dina hoy kante."),
        ("the girl gave my ring to the fox.", "al dina al ruvat min ondam davade."),
    ],
)
def test_veltish_grammar(generator: ModuleType, english: str, veltish: str) -> None:
    assert generator.translate_to_veltish(english) == veltish


@pytest.mark.parametrize(
    "wrong", ["the dog.", "dog the sleeps.", "the dog sleeps", "the dog sees."]
)
def test_what_is_not_english_is_not_translated(generator: ModuleType, wrong: str) -> None:
    with pytest.raises(ValueError, match=r"not a|expected"):
        generator.translate_to_veltish(wrong)


def test_veltish(generator: ModuleType) -> None:
    rows = generator.read_pairs_table((DATA / "veltish.tsv").read_text())
    assert len(rows) == len({english for english, _ in rows}) == 12_000
    assert len({veltish for _, veltish in rows}) == len(rows)  # nothing is lost in translation
    assert {len(english.split()) for english, _ in rows} == set(range(3, 26))
    stems = [
        *generator.NOUNS.values(),
        *generator.ADJECTIVES.values(),
        *generator.NUMBERS.values(),
        *(stem for _, _, stem in generator.VERBS),
    ]
    assert len(set(stems)) == len(stems)
    fresh = generator.fresh_veltish(30, seed=7)
    assert len(fresh) == 30
    assert not {english for english, _ in rows}.intersection(english for english, _ in fresh)


@pytest.mark.slow
def test_the_course_model_learns_the_grammar(
    generator: ModuleType, cli: Cli, tmp_path: Path
) -> None:
    shown = cli("train", DATA / "tiny.txt", "--preset", "nano")
    assert shown.returncode == 0, shown.stderr
    model = nanolm.load(tmp_path / "runs/tiny")
    prompts = ("the", "a small", "the cat sleeps", "a bird sees the dog")
    texts = [prompt + model.generate(prompt, greedy=True) for prompt in prompts]
    shown = cli("sample", "--prompt", prompts[0], "--greedy")
    assert shown.stdout == texts[0] + "\n"
    right = []
    for text in texts:
        *sentences, last = text.split("\n")
        assert len(sentences) > 10
        right += [generator.tiny_allows(sentence) for sentence in sentences]
        assert generator.tiny_allows(last) or generator.tiny_allows_prefix(last), last
    assert sum(right) > 0.9 * len(right), texts  # not quite all: it saw 1,119 tokens
