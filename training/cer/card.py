"""The data card: what a CER data set holds, who decided its labels, and how it was made.

`write` reads `CerRecord` files once, in constant memory, and writes ``card.json`` (the numbers) and
``README.md`` (the same as a page, from ``card.md.jinja``). Both depend only on the rows, the reports,
the settings and the seed: they hold no date and no path.

Intervals are Wilson's at 95 %. They treat the rows of one dialogue as independent, so they are
somewhat too narrow.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from compeer_core.cer import CerRecord, DecidedBy, Variant
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker
from compeer_core.reasoning import STEPS, Part
from compeer_core.safety import find_risk
from compeer_core.stats import wilson
from compeer_core.taxonomy import Preference
from training.cer.records import StepReport
from training.cer.requests.seeding import generator_for
from training.cer.step_files import write_json, write_whole
from training.data.records import read_records

README = "README.md"
JSON = "card.json"

LICENCES = (
    "none stated",
    "unknown",
    "academic",
    "CC BY-NC-SA",
    "CC BY-NC",
    "GPL",
    "CC BY-SA",
    "CC BY",
    "MIT",
    "CC0",
)
"""Prefixes of licence names, the strictest first; any other licence counts as unknown."""

_LAST_TURNS = 3
"""Turns of the history that an example shows."""
_LONGEST_TEXT = 400
"""Characters of each text that an example shows."""


class Settings(FrozenModel):
    """The texts of the card."""

    title: str = "A CER data set"
    """The heading."""
    command: str = ""
    """The command that reproduces the data set."""
    about: str = ""
    """The first paragraph."""
    quotable: Mapping[str, str] = {
        "esconv": "ESConv (Liu et al. 2021), CC BY-NC 4.0",
        "dailydialog": "DailyDialog (Li et al. 2017), CC BY-NC-SA 4.0",
        "counselchat": "counsel-chat (Bertagnolli), MIT",
        "empathetic_dialogues": "EmpatheticDialogues (Rashkin et al. 2019), CC BY-NC 4.0",
    }
    """Corpora whose licence allows quoting an example, with the attribution."""
    limits: tuple[str, ...] = ()
    """Further limits, one sentence each."""


class Kind(StrEnum):
    """The kinds of examples, in the order of the card."""

    RIGHT = "All three steps right"
    WRONG = "At least one step wrong, with the reason"
    HUMAN = "Judged by a person"
    REWRITTEN = "Rewritten"


EXAMPLES: Mapping[Kind, int] = {Kind.RIGHT: 2, Kind.WRONG: 2, Kind.HUMAN: 1, Kind.REWRITTEN: 1}
"""How many examples of each kind are shown at most."""


class Share(FrozenModel):
    """The share of judged rows that have a label."""

    count: int
    of: int
    low: float
    """Bounds of the 95 % CI, in [0, 1]."""
    high: float

    @property
    def value(self) -> float:
        return self.count / self.of


def share(count: int, of: int) -> Share:
    """Return a share with Wilson's interval; `of` is at least 1."""
    interval = wilson(count, of)
    return Share(count=count, of=of, low=round(interval.low, 4), high=round(interval.high, 4))


class Example(FrozenModel):
    """A row as shown in the card."""

    kind: Kind
    id: str
    source: str
    """The attribution of the quoted corpus."""
    history: tuple[str, ...]
    """The last turns, each prefixed with its speaker."""
    candidates: tuple[str, ...]
    """In the order of the row."""
    verdicts: tuple[str, ...]

    @property
    def text(self) -> str:
        """The turns, then the candidates."""
        named = zip(("First", "Second"), self.candidates, strict=False)
        return "\n".join([*self.history, "", *(f"{place} {text}" for place, text in named)])


class Card(FrozenModel):
    """The content of the card."""

    title: str
    about: str
    command: str
    files: Mapping[str, int]
    """Rows by file."""
    counts: Mapping[str, Mapping[str, int]]
    """Rows by corpus, language, split, author, variant and decision."""
    wrong: Mapping[str, Mapping[str, Share]]
    """By group of rows ("all" or a split), then by step: how often it is wrong."""
    preferences: Mapping[str, Mapping[str, Share]]
    """By group of rows, then by preference."""
    licences: Mapping[str, int]
    """Rows by licence of the corpus, the strictest first."""
    reports: tuple[StepReport, ...]
    examples: tuple[Example, ...]
    limits: tuple[str, ...]


def write(
    files: Mapping[str, Path],
    output: Path,
    reports: Sequence[StepReport],
    settings: Settings,
    seed: int = 0,
) -> StepReport:
    """Read rows and write the card.

    Args:
        files: Files of `CerRecord` rows, by their name in the card.
        output: The folder that receives `README` and `JSON`, each written atomically.
        reports: Reports of the steps that made the rows, in order.
        settings: The texts of the card.
        seed: Draws the examples.

    Raises:
        ConfigError: A file is missing or has another format.
    """
    card = describe(files, reports, settings, seed)
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / JSON, card.model_dump(mode="json"))
    write_whole(output / README, render(card))
    return StepReport(step="card", read=sum(card.files.values()), written=1)


# --- counting ---------------------------------------------------------------------------------


@dataclass
class _Tally:
    counts: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    labels: defaultdict[tuple[str, Part], Counter[bool]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    preferences: defaultdict[str, Counter[Preference]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    licences: Counter[str] = field(default_factory=Counter)
    examples: defaultdict[Kind, list[tuple[float, str, Example]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, record: CerRecord) -> None:
        case = record.case
        for facet, values in _facets(record).items():
            self.counts[facet].update(values)
        self.licences[case.licence] += 1
        for group in ("all", case.split):
            for candidate in record.candidates:
                for part, right in zip(STEPS, candidate.steps or (), strict=False):
                    if right is not None:
                        self.labels[group, part][right] += 1
            if record.preference is not None:
                self.preferences[group][record.preference] += 1


def _facets(record: CerRecord) -> Mapping[str, Sequence[str]]:
    case = record.case
    decided = [f"steps: {_by(c.steps_by)}" for c in record.candidates if c.steps_by is not None]
    if record.preference_by is not None:
        decided.append(f"preference: {_by(record.preference_by)}")
    return {
        "corpus": [case.corpus],
        "language": [case.language],
        "split": [case.split],
        "author of a reply": [candidate.author for candidate in record.candidates],
        "variant": [record.variant.value],
        "decided by": decided,
    }


def _by(decided: DecidedBy) -> str:
    if decided.kind in {"person", "people"}:
        return decided.kind  # the name may be an annotator's pseudonym
    return f"{decided.kind} ({decided.name})"


def describe(
    files: Mapping[str, Path], reports: Sequence[StepReport], settings: Settings, seed: int
) -> Card:
    """Count the rows of all files and draw the examples; see `write`."""
    tally = _Tally()
    rows: dict[str, int] = {}
    for name, path in files.items():
        rows[name] = 0
        for record in read_records(path, CerRecord):
            rows[name] += 1
            tally.add(record)
            _offer(tally, record, settings, seed)
    return Card(
        title=settings.title,
        about=settings.about,
        command=settings.command,
        files=rows,
        counts={facet: _sorted(counter) for facet, counter in tally.counts.items()},
        wrong=_wrong(tally),
        preferences=_preferences(tally),
        licences=dict(sorted(tally.licences.items(), key=lambda each: (strictness(each[0]), each))),
        reports=tuple(reports),
        examples=tuple(
            example
            for kind in Kind
            for _, _, example in sorted(tally.examples[kind], key=lambda each: (-each[0], each[1]))
        ),
        limits=(*_limits(tally), *settings.limits),
    )


def _sorted(counter: Counter[str]) -> dict[str, int]:
    return dict(sorted(counter.items(), key=lambda each: (-each[1], each[0])))


def _groups(tally: _Tally) -> list[str]:
    return ["all", *(split for split in ("train", "valid", "test") if tally.counts["split"][split])]


def _wrong(tally: _Tally) -> dict[str, dict[str, Share]]:
    shares = {
        group: {
            part.value: share(counter[False], counter.total())
            for part in STEPS
            if (counter := tally.labels[group, part]).total()
        }
        for group in _groups(tally)
    }
    return {group: steps for group, steps in shares.items() if steps}


def _preferences(tally: _Tally) -> dict[str, dict[str, Share]]:
    return {
        group: {answer.value: share(counter[answer], counter.total()) for answer in Preference}
        for group in _groups(tally)
        if (counter := tally.preferences[group]).total()
    }


def strictness(licence: str) -> int:
    """Return the rank of a licence in `LICENCES`, 0 for the strictest.

    Example:
        >>> strictness("CC BY-NC 4.0") < strictness("CC BY 4.0") < strictness("MIT")
        True
    """
    prefixes = [name for name in LICENCES if licence.casefold().startswith(name.casefold())]
    return LICENCES.index(max(prefixes, key=len, default="unknown"))


def _limits(tally: _Tally) -> list[str]:
    """Return the limits that follow from the deciders and the languages of the rows."""
    decided = tally.counts["decided by"]
    limits = []
    if any(": rule" in name for name in decided):
        limits.append(
            "No person judged the labels decided by a rule. The rule compares a turn with the human "
            "labels of the corpus. It cannot tell whether a sentence makes sense, and accepts a "
            "hallucinated quote in a step that names the right problem."
        )
    if any("not chained" in name for name in decided):
        limits.append(
            "Some labels come from the unchained control, in which no step depends on another."
        )
    elif any("chained" in name for name in decided):
        limits.append(
            "Labels of later steps depend on earlier ones by construction: after a wrong step, a "
            "similar emotion or a common strategy counts as wrong, even if a reader would accept it."
        )
    if any(": model" in name for name in decided):
        limits.append("Labels decided by a model contain the errors of that model.")
    if len(tally.counts["language"]) == 1:
        limits.append(f"The only language is {next(iter(tally.counts['language']))}.")
    limits.append(
        "The dialogues are about hard times, and some texts are upsetting. Do not use this data to "
        "make decisions about a person; a model trained on it is no substitute for professional help."
    )
    return limits


# --- examples ---------------------------------------------------------------------------------


def _offer(tally: _Tally, record: CerRecord, settings: Settings, seed: int) -> None:
    """Keep the row as an example if its draw is among the smallest."""
    kind = _kind(record)
    source = settings.quotable.get(record.case.corpus)
    if kind is None or source is None:
        return
    heap = tally.examples[kind]
    # Negated, because heapq removes the smallest value.
    draw = -generator_for(seed, "example", record.id).random()
    full = len(heap) >= EXAMPLES[kind]
    if (full and draw <= heap[0][0]) or _shows_risk(record):
        return
    entry = (draw, record.id, _example(record, kind, source))
    if full:
        heapq.heapreplace(heap, entry)
    else:
        heapq.heappush(heap, entry)


def _kind(record: CerRecord) -> Kind | None:
    if record.variant in {Variant.REWRITE, Variant.PERSONA}:
        return Kind.REWRITTEN
    deciders = [c.steps_by for c in record.candidates] + [record.preference_by]
    if any(by is not None and by.kind in {"person", "people"} for by in deciders):
        return Kind.HUMAN
    for candidate in record.candidates:
        if candidate.steps == (True, True, True):
            return Kind.RIGHT
        if candidate.steps is not None and False in candidate.steps:
            return Kind.WRONG
    return None


def _shows_risk(record: CerRecord) -> bool:
    """Whether a text shows signs of danger: such rows are not used as examples."""
    texts = [each.text for each in record.case.history]
    texts += [candidate.reply for candidate in record.candidates]
    return any(find_risk(text, record.case.language) is not None for text in texts)


def _example(record: CerRecord, kind: Kind, source: str) -> Example:
    speakers = {Speaker.SEEKER: "Seeker", Speaker.SUPPORTER: "Supporter"}
    verdicts = []
    for place, candidate in zip(("First", "Second"), record.candidates, strict=False):
        if candidate.steps is not None:
            steps = ", ".join(
                f"{part} {_VERDICTS[right]}"
                for part, right in zip(STEPS, candidate.steps, strict=True)
            )
            verdicts.append(f"{place}: {steps}")
        if candidate.reason:
            verdicts.append(f"{place}, reason: {candidate.reason}")
    if record.preference is not None and record.preference_by is not None:
        verdicts.append(f"Preference: {record.preference} ({_by(record.preference_by)})")
    return Example(
        kind=kind,
        id=record.id,
        source=source,
        history=tuple(
            f"{speakers[turn.speaker]}: {_short(turn.text)}"
            for turn in record.case.history[-_LAST_TURNS:]
        ),
        candidates=tuple(
            f"({candidate.author}) {candidate.turn or _short(candidate.reply)}"
            for candidate in record.candidates
        ),
        verdicts=tuple(verdicts),
    )


_VERDICTS = {True: "right", False: "wrong", None: "not judged"}


def _short(text: str) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) <= _LONGEST_TEXT else f"{joined[:_LONGEST_TEXT].rstrip()} ..."


# --- the page ---------------------------------------------------------------------------------


def render(card: Card) -> str:
    """Return the card in Markdown."""
    reports = {report.step: report for report in card.reports}
    strictest = next(iter(card.licences), "none stated")
    page = _templates().get_template("card.md.jinja")
    return page.render(
        card=card,
        licence_tag=_licence_tag(strictest),
        strictest=strictest,
        steps=[part.value for part in STEPS],
        preferences=[answer.value for answer in Preference],
        wrong=[
            [name, *(row.get(part.value) for part in STEPS)] for name, row in card.wrong.items()
        ],
        compared=[[name, *row.values()] for name, row in card.preferences.items()],
        counts=[["file", *row] for row in card.files.items()]
        + [[facet, *row] for facet, counts in card.counts.items() for row in counts.items()],
        dropped=[
            [report.step, corpus, reason, count]
            for report in card.reports
            for corpus, reasons in report.dropped.items()
            for reason, count in reasons.items()
            if count
        ],
        silver=_silver(reports["silver"]) if "silver" in reports else None,
        agreement=reports["settle"].figures if "settle" in reports else {},
        decontamination=reports["leaks"].figures if "leaks" in reports else {},
        examples=[(kind, [e for e in card.examples if e.kind is kind]) for kind in Kind],
    )


def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the page is Markdown
    )
    environment.filters |= {"cell": _cell, "percent": _percent, "fenced": _fenced}
    return environment


def _licence_tag(licence: str) -> str:
    """Return the name of a licence on the hub, or "other"."""
    slug = licence.casefold().replace(" ", "-")
    return slug if slug.startswith("cc") or slug == "mit" else "other"


def _silver(report: StepReport) -> dict[str, list[list[object]] | list[str]]:
    """Return the tables of the silver rule: error rates and dependence, before and after selection."""
    figures = report.figures
    rates: list[list[object]] = []
    links: list[list[object]] = []
    for split in ("train", "valid", "test"):
        for which, words in (("raw", "judged"), ("selected", "selected")):
            prefix = f"{split}.{which}"
            if not figures.get(f"{prefix}.rows"):
                continue
            wrong = [_percent(figures.get(f"{prefix}.wrong.{part}")) for part in STEPS]
            rates.append([split, words, figures[f"{prefix}.rows"], *wrong])
            for part in STEPS[1:]:
                about = f"{prefix}.{part}"
                after = [f"{about}.wrong_after_{earlier}" for earlier in ("wrong", "right")]
                links.append(
                    [
                        *(split, words, part.value),
                        *(_percent(figures.get(name)) for name in after),
                        *(figures.get(f"{about}.{name}") for name in ("phi", "bits")),
                    ]
                )
    notes = [
        f"In {name.split('.')[0]}, {value}."
        for name, value in figures.items()
        if name.endswith(".note")
    ]
    return {"rates": rates, "links": links, "notes": notes}


def _cell(value: object) -> str:
    """Return a cell of a table: numbers with separators, other floats to three decimals."""
    if value is None:
        return "–"
    if isinstance(value, Share):
        low, high = 100 * value.low, 100 * value.high
        return f"{100 * value.value:.1f} % ({low:.1f} to {high:.1f}; n = {value.of:,})"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _percent(value: float | int | str | None) -> str | None:
    return None if value is None else f"{100 * float(value):.1f} %"


def _fenced(text: str) -> str:
    """Return a code block whose fence does not occur in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
