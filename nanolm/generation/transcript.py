"""Incremental decoding: only whole characters, and nothing of a stop text.

>>> transcript = Transcript(stops=("END",))
>>> transcript.add("日本".encode()[:4]), transcript.add("日本".encode()[4:])
('日', '本')
"""

import codecs

from nanolm.text import spelled
from nanolm.text.tokenizer import Tokenizer


class Transcript:
    """The text of one sample. Holds back text that may be the beginning of a stop text."""

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self.stops = stops
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.held = ""
        self.stopped = False  # at a stop text; the text from `add` ends before it

    def add(self, token: bytes, heed_stops: bool = True) -> str:
        """The text that is final now. With `heed_stops` False, stop texts are ordinary text."""
        if not self.stops:
            return self.decoder.decode(token)
        self.held += self.decoder.decode(token)
        found = [(at, at + len(stop)) for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if found and heed_stops:
            self.stopped = True
            return self.release(min(found)[0])
        passed = self.release(max(end for _, end in found)) if found else ""
        # The end may be the beginning of a stop text.
        open_ends = (
            size
            for stop in self.stops
            for size in range(min(len(stop) - 1, len(self.held)), 0, -1)
            if self.held.endswith(stop[:size])
        )
        return passed + self.release(len(self.held) - max(open_ends, default=0))

    def finish(self) -> str:
        """The text held back, once no more tokens follow."""
        if self.stopped:
            return ""
        self.held += self.decoder.decode(b"", final=True)
        return self.release(len(self.held))

    def release(self, size: int) -> str:
        text, self.held = self.held[:size], self.held[size:]
        return text


def token_name(tokenizer: Tokenizer, id: int) -> str:
    """A token as text, even if it is part of a character; a special token by its name."""
    return tokenizer.special.get(id) or spelled(tokenizer.tokens[id])
