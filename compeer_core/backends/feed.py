"""Split a stream of text chunks at markers.

A policy reads a turn part by part (up to a closing tag), but endpoints and scripts send chunks of any
size. `TextFeed` converts between the two.
"""

from collections.abc import Iterator


class TextFeed:
    """Returns a stream of text piece by piece; text after a piece is buffered for the next.

    Example:
        >>> feed = TextFeed(iter(["one</", "a>two", " three"]))
        >>> list(feed.take("</a>")), list(feed.take())
        (['one</', 'a>'], ['two', ' three'])
    """

    def __init__(self, chunks: Iterator[str]) -> None:
        self._chunks = chunks
        self._buffer = ""
        self.exhausted = False
        """The text has ended and the buffer is empty."""

    def take(self, until: str | None = None) -> Iterator[str]:
        """Yield text up to and including the next `until`, or the rest."""
        seen = ""
        while True:
            if self._buffer:
                chunk, self._buffer = self._buffer, ""
            else:
                following = next(self._chunks, None)
                if following is None:
                    self.exhausted = True
                    return
                chunk = following
            if until:
                # `until` may span chunks, so search the end of the previous text, too.
                window = seen + chunk
                start = window.find(until)
                if start >= 0:
                    end = start + len(until) - len(seen)
                    self._buffer = chunk[end:]
                    yield chunk[:end]
                    return
                seen = window[max(0, len(window) - len(until) + 1) :]
            if chunk:
                yield chunk
