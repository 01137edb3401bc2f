"""Texts that must not be generated, however they are tokenized.

    >>> bans = BannedTexts(("cat",), tokenizer, device)
    >>> bans.banned[bans.after(tokenizer.encode("a ca"))]  # True for t, to, tch, ...

An automaton reads the text byte by byte. Its state is the longest prefix of a banned text that the
text ends with. A token is banned in a state if its bytes would complete a banned text.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from nanolm.text.tokenizer import Tokenizer


class BannedTexts:
    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, device: torch.device) -> None:
        self.follow, complete = automaton([text.encode() for text in texts])
        self.tokens = tokens = tokenizer.tokens
        sizes = np.array([len(token) for token in tokens])
        states = np.repeat(np.arange(len(complete), dtype=np.int32)[:, None], len(tokens), axis=1)
        banned = np.zeros(states.shape, dtype=bool)
        for place in range(sizes.max()):
            at = np.flatnonzero(sizes > place)  # tokens that have a byte at this index
            states[:, at] = self.follow[states[:, at], np.array([tokens[id][place] for id in at])]
            banned[:, at] |= complete[states[:, at]]
        self.next = torch.from_numpy(states).to(device)  # (states, vocabulary)
        self.banned = torch.from_numpy(banned).to(device)  # (states, vocabulary)

    def after(self, ids: Iterable[int]) -> int:
        state = 0
        for byte in b"".join(self.tokens[id] for id in ids):
            state = int(self.follow[state, byte])
        return state


def automaton(texts: list[bytes]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Transitions by state and byte (states, 256), and the states in which one of `texts` ends.
    A state is the longest prefix of `texts` that the bytes read so far end with."""
    starts = sorted({text[:size] for text in texts for size in range(len(text) + 1)}, key=len)
    number = {start: state for state, start in enumerate(starts)}
    follow = np.zeros((len(starts), 256), dtype=np.int64)
    for state, start in enumerate(starts):
        if start:  # fall back to its longest suffix that is also a prefix
            ends = (start[cut:] for cut in range(1, len(start) + 1))
            follow[state] = follow[number[next(end for end in ends if end in number)]]
        for byte in range(256):
            if (longer := start + bytes([byte])) in number:
                follow[state, byte] = number[longer]
    return follow, np.array([any(start.endswith(text) for text in texts) for start in starts])
