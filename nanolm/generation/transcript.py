"""From tokens to text as it comes: no character in halves, and nothing of a stop text.

>>> transcript = Transcript(stops=("END",))
>>> transcript.add("日本".encode()[:4]), transcript.add("日本".encode()[4:])
('日', '本')
"""

import codecs

from nanolm.text import spelled
from nanolm.text.tokenizer import Tokenizer


class Transcript:
    """The text of one sample. What could still become a stop text is held back."""

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self.stops = stops
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.held = ""
        self.stopped = False  # a stop text stood there; what `add` gave ends before it

    def add(self, token: bytes, heed_stops: bool = True) -> str:
        """The text that is certain now; a stop text before they are heeded is like any other."""
        if not self.stops:
            return self.decoder.decode(token)
        self.held += self.decoder.decode(token)
        found = [(at, at + len(stop)) for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if found and heed_stops:
            self.stopped = True
            return self.release(min(found)[0])
        passed = self.release(max(end for _, end in found)) if found else ""
        # A stop text may begin with what stands at the end.
        open_ends = (
            size
            for stop in self.stops
            for size in range(min(len(stop) - 1, len(self.held)), 0, -1)
            if self.held.endswith(stop[:size])
        )
        return passed + self.release(len(self.held) - max(open_ends, default=0))

    def finish(self) -> str:
        """What was held back, when nothing more comes."""
        if self.stopped:
            return ""
        self.held += self.decoder.decode(b"", final=True)
        return self.release(len(self.held))

    def release(self, size: int) -> str:
        text, self.held = self.held[:size], self.held[size:]
        return text


def token_name(tokenizer: Tokenizer, id: int) -> str:
    """A token as text, whole characters or not; one that stands for none by its name."""
    return tokenizer.special.get(id) or spelled(tokenizer.tokens[id])
