"""Somebody's browser without a browser: the page's calls in gradio's own protocol, over HTTP."""

import json
import secrets
import threading
from typing import Any

import httpx

from ui_components.shared.services import Services

CONVERSATION = "conversation-" + "x" * 16


class Page:
    """The page in one browser."""

    def __init__(
        self, address: str, services: Services, language: str = "en", *, listens: bool = False
    ) -> None:
        """Open the page; ``listens`` hears every call out in the background, as a browser does."""
        self._listens = listens
        headers = {"accept-language": language}
        self.http = httpx.Client(base_url=address, timeout=60, headers=headers)
        self.http.get("/")
        self.visitor = services.visitors.read(dict(self.http.cookies))
        config = self.http.get("/config").json()
        names = {each["id"]: each["props"].get("elem_id") for each in config["components"]}
        self._numbers = {
            (names.get(component), trigger): each["id"]
            for each in config["dependencies"]
            for component, trigger in each["targets"]
        }

    def act(self, element: str, trigger: str, *data: Any, **about: Any) -> list[Any]:
        """Do what is answered at once; ``about`` is what the page's script says of it."""
        body = self._body(element, trigger, data) | {"event_data": about}
        answer = self.http.post("/gradio_api/run/predict", json=body)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["data"])

    def begin(self, element: str, trigger: str, *data: Any) -> str:
        """Put a call into the queue, and look at nothing that comes of it; returns its session."""
        body = self._body(element, trigger, data)
        answer = self.http.post("/gradio_api/queue/join", json=body)
        assert answer.status_code == 200, answer.text
        session = str(body["session_hash"])
        if self._listens:
            threading.Thread(target=self.outcome, args=(session,), daemon=True).start()
        return session

    def outcome(self, session: str) -> str:
        """Wait until a call that was begun has ended, and return all that the page got of it."""
        told = []
        query = {"session_hash": session}
        with self.http.stream("GET", "/gradio_api/queue/data", params=query) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    message = json.loads(line[5:])
                    told.append(json.dumps(message, ensure_ascii=False))
                    if message["msg"] == "process_completed":
                        assert message["success"], message
                        break
        return "\n".join(told)

    def say(self, words: str, model: str = "maple-1") -> str:
        message = {"text": words, "files": []}
        return self.begin("message", "submit", message, "", model, "", "", CONVERSATION)

    def compare(self, words: str) -> str:
        """Ask for a comparison whose words may be kept."""
        wish = ("blind", [], False, True, CONVERSATION)
        return self.begin("compare-message", "submit", {"text": words, "files": []}, "", *wish)

    def vote(self, conversation: str, battle: str, preference: str = "first") -> str:
        """Vote, and return what stands at the place for refusals."""
        about = {"battle": battle, "preference": preference, "revision": 0}
        return str(self.act("compare-ballot", "vote", conversation, **about)[2])

    def _body(self, element: str, trigger: str, data: tuple[Any, ...]) -> dict[str, Any]:
        return {
            "data": data,
            "fn_index": self._numbers[element, trigger],
            "session_hash": secrets.token_hex(6),
        }
