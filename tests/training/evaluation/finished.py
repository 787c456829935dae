"""Real runs of three evaluations: tiny checkpoints reply to a scripted seeker, agent, judge and reader.

Seekers write HTML and control characters: reports must show it as text.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import build_qwen
from tests.training.cer.endpoint import Body, asked
from training.evaluation import blind_reading, esc_eval, sage
from training.evaluation.esc_eval_scores import DIMENSIONS
from training.stages import WaitingForPeople

HOSTILE = (
    "</p></details><script>document.title = 'owned'</script><img src=//evil.test/x> & \u202eolleh"
)
COUNT = 6
"""Cards, profiles and contexts."""


def speak(body: Body) -> str:
    """A seeker who is hostile, an agent whose emotion rises, and a judge who counts letters."""
    question = asked(body)
    if body["model"] == "judge":
        return str(question.count("e") % 5)
    if body["model"] == "seeker":
        return "Hm." if len(body["messages"]) > 2 else f"I feel bad. {HOSTILE}"
    if "Change:" in question:
        return f"Activity: hm\nChange: {question.count('a') % 19 - 6}"
    return "Response: Go on."


class Finished:
    """A folder of runs, made on demand. `url` is that of an endpoint that answers with `speak`."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self._url = folder, url
        self.checkpoints = {
            name: build_qwen(folder / name, seed=number, max_position_embeddings=4096)
            for number, name in enumerate(("kind", "curt"))
        }

    def _model(self, name: str) -> dict[str, Any]:
        return {"source": f"openai:{self._url}#{name}", "tries": 1, "backoff_seconds": 0.0}

    def _policy(self, name: str) -> dict[str, Any]:
        short = {"max_new_tokens": 12, "tries": 6, "style": "trained"}
        return {"name": name, "source": str(self.checkpoints[name])} | short

    def esc_eval(self, run: str, *policies: str, **changes: Any) -> Path:
        """A run about `COUNT` cards with one judge."""
        cards, rubrics = self.folder / "cards.json", self.folder / "rubrics.json"
        cards.write_text(json.dumps([{"base": f"card {n}"} for n in range(COUNT)]))
        texts = {key: [key] * len(DIMENSIONS) for key in ("prompt_EN", "prompt_ZH")}
        names = [*DIMENSIONS]
        rubrics.write_text(json.dumps({"key_list": names, "dimension_list": names, **texts}))
        config = {
            "output": self.folder / run,
            "results": self.folder / "results",
            "name": run,
            "cards": {"en": cards},
            "rubrics": rubrics,
            "seeker": self._model("seeker"),
            "judges": [{"name": "judge", **self._model("judge")}],
            "policies": [self._policy(name) for name in policies],
        }
        esc_eval.run(esc_eval.Config.model_validate(config | changes))
        return self.folder / run

    def sage(self, run: str, *policies: str, **changes: Any) -> Path:
        """A run about `COUNT` profiles with two seeds."""
        profiles = self.folder / "profiles.jsonl"
        person = dict.fromkeys(("player", "scene", "main_cha", "task"), "x")
        rows = [
            person | {"id": f"p{n}", "first_talk": f"I am {n}. {HOSTILE}"} for n in range(COUNT)
        ]
        profiles.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = {
            "output": self.folder / run,
            "results": self.folder / "results",
            "name": run,
            "profiles": profiles,
            "simulator": self._model("simulator"),
            "seeds": [0, 1],
            "max_turns": 4,
            "policies": [self._policy(name) for name in policies],
        }
        sage.run(sage.Config.model_validate(config | changes))
        return self.folder / run

    def reading(self, run: str, *policies: str, **changes: Any) -> Path:
        """A run about `COUNT` first messages, judged by rule."""
        first = self.folder / "first.txt"
        first.write_text("\n\n".join(f"Message {n} {HOSTILE}" for n in range(COUNT)) + "\n")
        config = {
            "output": self.folder / run,
            "results": self.folder / "results",
            "name": f"reading_{run}",
            "contexts": [{"path": first, "count": COUNT}],
            "reader": "a rule",
            "label_source": "llm",
            "max_new_tokens": 12,
            "policies": [
                {"name": name, "source": str(self.checkpoints[name])} for name in policies
            ],
        }
        validated = blind_reading.Config.model_validate(config | changes)
        with pytest.raises(WaitingForPeople):
            blind_reading.run(validated)
        judgements = []
        for line in (validated.output / "sheet.jsonl").read_text(encoding="utf-8").splitlines():
            sheet = json.loads(line)
            ratings = [
                {
                    "grammatical": "e" in reply,
                    "answers": "a" in reply,
                    "may_hurt": False,
                    "claims_human": False,
                    "rank": 1,
                }
                for reply in sheet["replies"]
            ]
            judgements.append(json.dumps({"id": sheet["id"], "replies": ratings}) + "\n")
        (validated.output / "judgements.jsonl").write_text("".join(judgements), encoding="utf-8")
        blind_reading.run(validated)
        return self.folder / run
