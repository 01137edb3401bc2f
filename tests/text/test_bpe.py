from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from nanolm.text.bpe import Pair, learn
from nanolm.text.tokenizer import ByteLevel
from nanolm.text.words import count_words


def merge(word: list[int], pair: Pair, new: int) -> list[int]:
    """`word` with every occurrence of `pair`, from the left, replaced by `new`."""
    merged: list[int] = []
    for token in word:
        if merged and (merged[-1], token) == pair:
            merged[-1] = new
        else:
            merged.append(token)
    return merged


def learn_slowly(words: Counter[bytes], vocab_size: int, known: Sequence[Pair] = ()) -> list[Pair]:
    """The textbook algorithm: count all pairs again for every merge."""
    pieces = {word: list(word) for word in words}
    merges = list(known)
    for number, pair in enumerate(known):
        pieces = {word: merge(tokens, pair, 256 + number) for word, tokens in pieces.items()}
    while 256 + len(merges) < vocab_size:
        counts: Counter[Pair] = Counter()
        for word, tokens in pieces.items():
            for pair in pairwise(tokens):
                counts[pair] += words[word]
        best = min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if best is None or counts[best] < 2:
            break
        pieces = {word: merge(tokens, best, 256 + len(merges)) for word, tokens in pieces.items()}
        merges.append(best)
    return merges


def test_the_example_of_the_module() -> None:
    assert learn(count_words(["low lower lowest"]), vocab_size=258) == [(108, 111), (256, 119)]


@given(st.lists(st.text("ab ,\n1é", max_size=30), max_size=8), st.integers(256, 300))
def test_equals_the_slow_algorithm(texts: list[str], vocab_size: int) -> None:
    words = count_words(texts)
    assert learn(words, vocab_size) == learn_slowly(words, vocab_size)


@given(
    st.lists(st.text("abc é", max_size=20), max_size=6),
    st.lists(st.text("abc é", max_size=20), max_size=6),
    st.integers(256, 300),
)
def test_other_texts_add_merges(before: list[str], texts: list[str], vocab_size: int) -> None:
    known = learn(count_words(before), 270)
    words = count_words(texts)
    merges = learn(words, vocab_size, known=known)
    assert merges == learn_slowly(words, vocab_size, known)
    tokens = ByteLevel(merges).tokens[:-2]
    assert len(set(tokens)) == len(tokens)


@given(st.lists(st.text("ab", min_size=1, max_size=40), min_size=1, max_size=8))
def test_no_two_merges_make_the_same_token(texts: list[str]) -> None:
    tokens = [bytes([byte]) for byte in range(256)]
    for left, right in learn(count_words(texts)):
        tokens.append(tokens[left] + tokens[right])
    assert len(set(tokens)) == len(tokens)


def test_without_a_limit_words_become_tokens() -> None:
    words = count_words(["the cat sees the dog. " * 3])
    merges = learn(words)
    for word in words:
        tokens = list(word)
        for number, pair in enumerate(merges):
            tokens = merge(tokens, pair, 256 + number)
        assert len(tokens) == 1, word
