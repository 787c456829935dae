"""Text that arrives in chunks of any size, handed out stretch by stretch.

A policy reads a turn part by part (up to a closing tag), while an endpoint or a script sends chunks
that know nothing of parts. `TextFeed` stands between the two.
"""

from collections.abc import Iterator


class TextFeed:
    """Hands out a running text in stretches; what follows a stretch is kept for the next.

    Example:
        >>> feed = TextFeed(iter(["one</", "a>two", " three"]))
        >>> list(feed.take("</a>")), list(feed.take())
        (['one</', 'a>'], ['two', ' three'])
    """

    def __init__(self, chunks: Iterator[str]) -> None:
        self._chunks = chunks
        self._kept = ""
        self.exhausted = False
        """The text has ended and nothing is kept back."""

    def take(self, until: str | None = None) -> Iterator[str]:
        """Yield text up to and including the next `until`, or all the rest."""
        seen = ""
        while True:
            if self._kept:
                chunk, self._kept = self._kept, ""
            else:
                following = next(self._chunks, None)
                if following is None:
                    self.exhausted = True
                    return
                chunk = following
            if until:
                # `until` may lie across chunks, so a match is looked for in what was seen before.
                window = seen + chunk
                start = window.find(until)
                if start >= 0:
                    end = start + len(until) - len(seen)
                    self._kept = chunk[end:]
                    yield chunk[:end]
                    return
                seen = window[max(0, len(window) - len(until) + 1) :]
            if chunk:
                yield chunk
