"""Turning decoded text into thinking and answer, piece by piece, and noticing stop texts.

The thinking block is closed by the first `</think>`; a block that a model opens by itself at the very start of its
answer is taken out as well. Tags later in an answer are the answer's own words and stay.
"""

from __future__ import annotations

from typing import Sequence

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class Transcript:
    """Text as it arrives. `push` returns the (piece, is_thinking) pairs that are settled: what could still turn out to
    be the beginning of a tag or a stop text is held back until `finish`."""

    def __init__(self, thinking: bool, stop: Sequence[str] = ()) -> None:
        self.in_thinking = thinking
        self.stopped = False
        self._stop = tuple(stop)
        self._held = ""
        self._thinking: list[str] = []
        self._text: list[str] = []
        self._at_start = True  # nothing but white space of the answer so far
        self._trim = thinking  # white space between the block and the answer is not part of either

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def thinking(self) -> str:
        return "".join(self._thinking).strip()

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Add decoded text; nothing is taken any more once `stopped`."""
        return self._drain(text, last=False)

    def finish(self) -> list[tuple[str, bool]]:
        """No more text will come: release what was held back."""
        return self._drain("", last=True)

    def _drain(self, text: str, last: bool) -> list[tuple[str, bool]]:
        self._held += text
        out: list[tuple[str, bool]] = []
        while not self.stopped and self._held:
            markers = self._markers()
            found = min(((at, m) for m in markers if (at := self._held.find(m)) >= 0), default=None)
            if found and found[1] == THINK_OPEN and self._held[: found[0]].strip():
                # Behind words of the answer the tag is part of them.
                self._take(self._held[: found[0] + len(THINK_OPEN)], out)
                self._held = self._held[found[0] + len(THINK_OPEN) :]
                continue
            if found is None:
                keep = 0 if last else _open_end(self._held, markers)
                ready = self._held[: len(self._held) - keep]
                self._held = self._held[len(self._held) - keep :]
                self._take(ready, out)
                break
            at, marker = found
            self._take(self._held[:at], out)
            self._held = self._held[at + len(marker) :]
            if marker == THINK_CLOSE:
                self.in_thinking = False
            elif marker == THINK_OPEN:
                self.in_thinking, self._trim = True, True
                self._text.clear()
            else:
                self.stopped = True
        return out

    def _markers(self) -> tuple[str, ...]:
        if self.in_thinking:
            return (THINK_CLOSE,)
        return self._stop + ((THINK_OPEN,) if self._at_start else ())

    def _take(self, piece: str, out: list[tuple[str, bool]]) -> None:
        if not self.in_thinking:
            if self._trim:
                piece = piece.lstrip()
            if piece.strip():
                self._at_start = self._trim = False
        if piece:
            (self._thinking if self.in_thinking else self._text).append(piece)
            out.append((piece, self.in_thinking))


def split_thinking(raw: str, inside: bool = False) -> tuple[str, str]:
    """(thinking, text) of a whole answer; `inside` when the prompt ended within the thinking block."""
    transcript = Transcript(inside)
    transcript.push(raw)
    transcript.finish()
    return transcript.thinking, transcript.text


def _open_end(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of the markers."""
    longest = max((len(m) for m in markers), default=0) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(m.startswith(text[-size:]) for m in markers):
            return size
    return 0
