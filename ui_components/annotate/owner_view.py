"""Renders the owner's sections of the annotation desk from values alone."""

import shlex
from collections.abc import Sequence
from urllib.parse import urlencode

from compeer_core.annotation.annotations import QUESTIONS
from compeer_core.annotation.items import CHECK, SAMPLES
from compeer_core.annotation.owner import BatchState, PersonState
from compeer_core.annotation.readings import ReaderAgreement
from compeer_core.annotation.report import Report
from compeer_core.reasoning import STEPS
from ui_components.annotate.view import measures, question_title
from ui_components.shared.templating import render
from ui_components.shared.texts import Texts

PLACES = ("people", "items", "agreement")
_FILES = ("annotations.csv", "annotations.jsonl", "cer.jsonl", "agreement.json")
_FILES_OF_READER = ("readings.jsonl", "reader_agreement.json")


def frame(place: str, content: str, texts: Texts, *, said: str = "") -> str:
    """Draw a section and what is around it."""
    return render("owner.html", t=texts, place=place, places=PLACES, content=content, said=said)


def people(states: Sequence[PersonState], token: str, database: str, texts: Texts) -> str:
    """Draw the annotators; a new one's token becomes a link that is shown once."""
    return render(
        "owner_people.html",
        t=texts,
        people=states,
        token=token,
        command=_command("annotator NAME", database),
    )


def items(
    batches: Sequence[BatchState], states: Sequence[PersonState], database: str, texts: Texts
) -> str:
    """Draw the batches with their assignment, and the import."""
    return render(
        "owner_items.html",
        t=texts,
        batches=[
            {
                "state": batch,
                "title": _title(batch, texts),
                "share": round(100 * batch.closed / batch.items),
                "overlap": round(100 * batch.twice / batch.items),
                "people": [
                    {"name": each.name, "chosen": each.name in batch.people}
                    for each in states
                    if not each.revoked or each.name in batch.people
                ],
            }
            for batch in batches
        ],
        has_samples=any(batch.name == SAMPLES for batch in batches),
        command=_command("items FILE.jsonl --pictures FOLDER", database),
    )


def agreement(
    batches: Sequence[tuple[BatchState, Report, ReaderAgreement | None]], texts: Texts
) -> str:
    """Draw the agreement in each batch: of people, and of people with the reader."""
    return render(
        "owner_agreement.html",
        t=texts,
        batches=[
            {
                "state": batch,
                "title": _title(batch, texts),
                "report": report,
                "people": [
                    {
                        "title": question_title(part, texts),
                        **measures(report.questions[part].agreement, texts),
                    }
                    for part in QUESTIONS
                ],
                "reader": reader,
                "with_reader": []
                if reader is None
                else [
                    {
                        "title": question_title(part, texts),
                        "stricter": reader.stricter[part] if part in STEPS else "–",
                        "milder": reader.milder[part] if part in STEPS else "–",
                        **measures(reader.questions[part], texts),
                    }
                    for part in QUESTIONS
                ],
                "files": [
                    {
                        "address": f"desk/export/{name}?{urlencode({'batch': batch.name})}",
                        "words": texts(f"owner.file_{name.replace('.', '_')}"),
                    }
                    for name in (*_FILES, *(_FILES_OF_READER if reader else ()))
                ],
            }
            for batch, report, reader in batches
        ],
    )


def _title(batch: BatchState, texts: Texts) -> str:
    titles = {"": "owner.unnamed", SAMPLES: "owner.batch_samples", CHECK: "owner.batch_check"}
    return texts(titles[batch.name]) if batch.name in titles else batch.name


def _command(command: str, database: str) -> str:
    return f"python -m compeer_core.votes {command} --database-url {shlex.quote(database)}"
