"""A fake endpoint in the test's process: OpenAI's chat protocol, as slow and faulty as required.

```python
with Endpoint(answer=lambda body: "Hello", latency=0.1, fault=at({3: refused(429)})) as endpoint:
    settings = GeneratorSettings(source=endpoint.source)
    ...
    assert endpoint.requests == 7
```

``answer`` gets the request's JSON and returns the text; `asked` returns the last message of a
request. ``fault`` gets the number of the request (from 1) and its JSON, and returns a `Fault` or
None. Both run in the server's only thread and may be replaced while it runs. A text in the wrong
language, or half a JSON written by the model, is an ``answer``, not a fault.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

Body = dict[str, Any]
Answer = Callable[[Body], str]


@dataclass(frozen=True)
class Fault:
    """A failure of one request."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    words: str = "fault of the test"
    """The error message of the server."""
    seconds: float = 0.0
    """Silence before anything is sent."""
    half: bool = False
    """The body is cut in the middle of its JSON."""
    reset: bool = False
    """The connection is reset in the middle of the reply."""


def refused(status: int, words: str = "fault of the test", **headers: str) -> Fault:
    """Refuse with a status such as 429; write headers as ``Retry_After="1"``."""
    return Fault(status, {name.replace("_", "-"): text for name, text in headers.items()}, words)


def silent(seconds: float = 60.0) -> Fault:
    """Send nothing for that long."""
    return Fault(seconds=seconds)


HALF_BODY = Fault(half=True)
RESET = Fault(reset=True)

Faults = Callable[[int, Body], Fault | None]


def at(faults: Mapping[int, Fault]) -> Faults:
    """Let these requests fail, counted from 1."""
    return lambda number, body: faults.get(number)


def always(fault: Fault) -> Faults:
    return lambda number, body: fault


def never(number: int, body: Body) -> Fault | None:
    return None


def asked(body: Body) -> str:
    """Return the text of the last message."""
    content = body["messages"][-1]["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def echo(body: Body) -> str:
    """Return a text that depends on the question and the seed alone."""
    return f"{asked(body)} / {body.get('seed')}"


class Endpoint:
    """The server. A context manager; its attributes can be read at any time.

    Attributes:
        bodies: The JSON of each request, in the order of arrival.
        headers: The headers of each, with lower-case names.
        connections: The number of connections opened.
        most_in_flight: The largest number of requests answered at the same time.
    """

    def __init__(
        self, answer: Answer = echo, *, latency: float = 0.0, fault: Faults = never
    ) -> None:
        self.answer = answer
        self.latency = latency
        self.fault = fault
        self.bodies: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.connections = 0
        self.most_in_flight = 0
        self.url = ""
        self._changes: list[tuple[float, int]] = []
        self._in_flight = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint")
        self._server: asyncio.Server | None = None

    @property
    def source(self) -> str:
        """For `GeneratorSettings.source`."""
        return f"openai:{self.url}#tiny"

    @property
    def requests(self) -> int:
        return len(self.bodies)

    @property
    def keys(self) -> list[str]:
        """The last messages of all requests, in the order of arrival."""
        return [asked(body) for body in self.bodies]

    def mean_in_flight(self) -> float:
        """Between the first request and the last answer, weighted by time."""
        area = 0.0
        for (begin, count), (end, _) in zip(self._changes, self._changes[1:], strict=False):
            area += count * (end - begin)
        return area / self.seconds()

    def seconds(self) -> float:
        """From the first request to the last answer."""
        return self._changes[-1][0] - self._changes[0][0]

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        return self

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- in the server's thread ----------------------------------------------------------------

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=512)

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode("latin-1").rstrip().split("\r\n")
                headers = {
                    name.lower(): text.strip()
                    for name, _, text in (line.partition(":") for line in lines)
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if not first.startswith("POST /v1/chat/completions "):
                    await self._refuse(writer, refused(404))
                    continue
                self._count(1)
                try:
                    await self._answer(writer, json.loads(body), headers)
                finally:
                    self._count(-1)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has gone, or the test is over
        finally:
            writer.close()

    def _count(self, change: int) -> None:
        self._in_flight += change
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        self._changes.append((time.monotonic(), self._in_flight))

    async def _answer(
        self, writer: asyncio.StreamWriter, body: Body, headers: dict[str, str]
    ) -> None:
        self.bodies.append(body)
        self.headers.append(headers)
        fault = self.fault(len(self.bodies), body)
        await asyncio.sleep(self.latency if fault is None else fault.seconds)
        if fault is not None and fault.status != 200:
            await self._refuse(writer, fault)
            return
        text = self.answer(body)
        usage = {"prompt_tokens": 1, "completion_tokens": len(text.split())}
        if not body.get("stream"):
            message = {"role": "assistant", "content": text}
            await self._send(
                writer,
                fault,
                {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage},
            )
            return
        middle = len(text) // 2
        events = [
            {"choices": [{"delta": {"content": piece}, "finish_reason": None}]}
            for piece in (text[:middle], text[middle:])
        ]
        events.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        events.append({"choices": [], "usage": usage})
        await self._stream(writer, fault, events)

    async def _refuse(self, writer: asyncio.StreamWriter, fault: Fault) -> None:
        data = json.dumps({"error": {"message": fault.words}}).encode()
        more = "".join(f"{name}: {text}\r\n" for name, text in fault.headers.items())
        writer.write(
            f"HTTP/1.1 {fault.status} Fault\r\nContent-Type: application/json\r\n{more}"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        await writer.drain()

    async def _send(self, writer: asyncio.StreamWriter, fault: Fault | None, content: Any) -> None:
        data = json.dumps(content).encode()
        sent = data[: len(data) // 2] if fault is not None and (fault.half or fault.reset) else data
        length = len(data if fault is not None and fault.reset else sent)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}"
        writer.write(head.encode() + b"\r\n\r\n" + sent)
        await self._end(writer, fault)

    async def _stream(
        self, writer: asyncio.StreamWriter, fault: Fault | None, events: list[Any]
    ) -> None:
        lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
        if fault is not None and fault.half:
            lines = [lines[0], lines[1][:-20] + b"\n\n"]
        if fault is not None and fault.reset:
            lines = lines[:1]
        else:
            lines.append(b"data: [DONE]\n\n")
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        blocks = [b"%x\r\n%s\r\n" % (len(line), line) for line in lines]
        writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(blocks))
        if fault is None or not fault.reset:
            writer.write(b"0\r\n\r\n")
        await self._end(writer, fault)

    async def _end(self, writer: asyncio.StreamWriter, fault: Fault | None) -> None:
        await writer.drain()
        if fault is not None and fault.reset:
            writer.transport.abort()
