from hypothesis import given
from hypothesis import strategies as st

from nanolm.generation.transcript import Transcript

LETTERS = st.text("ab日", max_size=30)


@given(LETTERS, st.lists(st.text("ab日", min_size=1, max_size=4), max_size=3), st.integers(1, 5))
def test_what_comes_is_the_text_before_the_first_stop(
    text: str, stops: list[str], size: int
) -> None:
    transcript = Transcript(tuple(stops))
    data = text.encode()
    shown = ""
    for start in range(0, len(data), size):
        shown += transcript.add(data[start : start + size])
        if transcript.stopped:
            break
        assert text.startswith(shown)
        # At most the beginning of a stop text and a part of a character are held back.
        read = data[: start + size].decode(errors="ignore")
        assert len(read) - len(shown) < max(map(len, stops), default=1)
    shown += transcript.finish()
    places = [text.find(stop) for stop in stops if stop in text]
    assert transcript.stopped == bool(places)
    # If several are complete at once, the first counts.
    assert shown == text[: min(places)] if places and size == 1 and len(stops) == 1 else True
    if places:
        assert not any(stop in shown for stop in stops)
        assert text.startswith(shown)
    else:
        assert shown == text


def test_stops_are_not_heeded_too_soon() -> None:
    transcript = Transcript(("x",))
    assert transcript.add(b"axb", heed_stops=False) == "axb"
    assert transcript.add(b"cxd") == "c"
    assert transcript.stopped
    assert transcript.finish() == ""


def test_a_stop_that_is_complete_in_time_counts_though_it_began_too_soon() -> None:
    transcript = Transcript(("<end>",))
    assert transcript.add(b"a<end><en", heed_stops=False) == "a<end>"
    assert transcript.add(b"d>b") == ""
    assert transcript.stopped
