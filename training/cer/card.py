"""The data card: what a CER data set holds, who decided its labels, and how it came about.

`write` reads rows of any files of `CerRecord` once, in constant memory, and writes ``card.json`` (the
numbers) and ``README.md`` (the same for a reader). Both depend on the rows, the reports and the
settings alone: no date, no path of a machine, no chance but that of the seed.

Intervals are Wilson's at 95 %. Rows of one dialogue count as independent there, so they are somewhat
narrow.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from compeer_core.cer import Candidate, CerRecord, DecidedBy, Variant
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker
from compeer_core.reasoning import STEPS, Part
from compeer_core.safety import find_risk
from compeer_core.stats import wilson
from compeer_core.taxonomy import Preference
from training.cer.records import StepReport
from training.cer.requests.seeding import generator_for
from training.cer.step_files import write_json
from training.data.samples import read_records

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
"""How licences begin, from the strictest to the most permissive; others count as unknown."""

_LAST_TURNS = 3
"""Turns of a history that an example shows."""
_LONGEST_TEXT = 400
"""Characters of a text that an example shows."""


class Settings(FrozenModel):
    """What stands in the card beside the numbers."""

    title: str = "A CER data set"
    """Its first line."""
    command: str = ""
    """Builds the data set again."""
    about: str = ""
    """A paragraph that comes first."""
    quotable: Mapping[str, str] = {
        "esconv": "ESConv (Liu et al. 2021), CC BY-NC 4.0",
        "dailydialog": "DailyDialog (Li et al. 2017), CC BY-NC-SA 4.0",
        "counselchat": "counsel-chat (Bertagnolli), MIT",
        "empathetic_dialogues": "EmpatheticDialogues (Rashkin et al. 2019), CC BY-NC 4.0",
    }
    """Corpora whose licence allows to quote an example, with the words that name the source."""
    limits: tuple[str, ...] = ()
    """Sentences that are added to the limits."""


class Kind(StrEnum):
    """What an example is an example of, in the order of the card."""

    RIGHT = "All three steps right"
    WRONG = "At least one step wrong, and what was found"
    HUMAN = "Judged by a person"
    REWRITTEN = "Rewritten"


EXAMPLES: Mapping[Kind, int] = {Kind.RIGHT: 2, Kind.WRONG: 2, Kind.HUMAN: 1, Kind.REWRITTEN: 1}
"""How many of each kind are shown, where there are so many."""


class Share(FrozenModel):
    """How many of the judged rows have a label."""

    count: int
    of: int
    low: float
    """Lower end of the interval, in [0, 1]."""
    high: float

    @property
    def value(self) -> float:
        return self.count / self.of


def share(count: int, of: int) -> Share:
    """Return a share with Wilson's interval; `of` is at least 1."""
    interval = wilson(count, of)
    return Share(count=count, of=of, low=round(interval.low, 4), high=round(interval.high, 4))


class Example(FrozenModel):
    """A row as the card shows it."""

    kind: Kind
    id: str
    source: str
    """Who is quoted."""
    history: tuple[str, ...]
    """The last turns, each with its speaker."""
    candidates: tuple[str, ...]
    """In the row's order."""
    verdicts: tuple[str, ...]


class Card(FrozenModel):
    """All that the card says."""

    title: str
    about: str
    command: str
    files: Mapping[str, int]
    """Rows by file."""
    counts: Mapping[str, Mapping[str, int]]
    """Rows by corpus, language, split, author, variant and decision."""
    wrong: Mapping[str, Mapping[str, Share]]
    """By group of rows ("all", a split), then by step: how often it is wrong."""
    preferences: Mapping[str, Mapping[str, Share]]
    """By group of rows, then by answer."""
    licences: Mapping[str, int]
    """Rows by licence of their corpus, the strictest first."""
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
        files: Files of `CerRecord` rows, by the name that the card gives them.
        output: The folder that receives `README` and `JSON`, each whole or not at all.
        reports: Of the steps that made the rows, in their order.
        settings: See there.
        seed: Draws the examples.

    Raises:
        ConfigError: A file is missing or holds something else.
    """
    card = describe(files, reports, settings, seed)
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / JSON, card.model_dump(mode="json"))
    fresh = output / f"{README}.new"
    fresh.write_text(render(card), encoding="utf-8")
    fresh.replace(output / README)
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
    # Pseudonyms of annotators are nobody's business here.
    return (
        decided.kind if decided.kind in {"person", "people"} else f"{decided.kind} ({decided.name})"
    )


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
    found: dict[str, dict[str, Share]] = {}
    for group in _groups(tally):
        labels = {part: tally.labels[group, part] for part in STEPS}
        found[group] = {
            part.value: share(counter[False], counter.total())
            for part, counter in labels.items()
            if counter.total()
        }
    return {group: steps for group, steps in found.items() if steps}


def _preferences(tally: _Tally) -> dict[str, dict[str, Share]]:
    return {
        group: {answer.value: share(counter[answer], counter.total()) for answer in Preference}
        for group in _groups(tally)
        if (counter := tally.preferences[group]).total()
    }


def strictness(licence: str) -> int:
    """Return the place of a licence in `LICENCES`, 0 being the strictest.

    Example:
        >>> strictness("CC BY-NC 4.0") < strictness("CC BY 4.0") < strictness("MIT")
        True
    """
    fitting = [
        place
        for place, name in enumerate(LICENCES)
        if licence.casefold().startswith(name.casefold())
    ]
    return max(fitting, key=lambda place: len(LICENCES[place]), default=LICENCES.index("unknown"))


def _limits(tally: _Tally) -> list[str]:
    """What follows from who decided, who wrote, and in which languages."""
    decided = tally.counts["decided by"]
    limits = []
    if any(": rule" in name for name in decided):
        limits.append(
            "Labels decided by a rule were judged by nobody. The rule compares a turn with what "
            "people had labelled in the corpus; it cannot tell whether a sentence makes sense, and "
            "does not hold an invented quotation against a step whose problem is right."
        )
    if any("not chained" in name for name in decided):
        limits.append("Some labels are the control in which no step depends on another.")
    elif any("chained" in name for name in decided):
        limits.append(
            "Later steps depend on earlier ones by construction: a near emotion or a usual strategy "
            "counts as wrong after a wrong step, although a reader may find it fitting."
        )
    if any(": model" in name for name in decided):
        limits.append("Labels decided by a model carry that model's mistakes.")
    if len(tally.counts["language"]) == 1:
        limits.append(f"The only language is {next(iter(tally.counts['language']))}.")
    limits.append(
        "People in these dialogues talk about hard times; some texts are upsetting. Nothing here is "
        "fit to decide about a person, and a model trained on it is no substitute for help."
    )
    return limits


# --- examples ---------------------------------------------------------------------------------


def _offer(tally: _Tally, record: CerRecord, settings: Settings, seed: int) -> None:
    """Keep the row as an example if it is one of the first by its draw."""
    kind = _kind(record)
    source = settings.quotable.get(record.case.corpus)
    if kind is None or source is None:
        return
    kept = tally.examples[kind]
    # Negative, so that the heap's root is the one to give way.
    draw = -generator_for(seed, "example", record.id).random()
    full = len(kept) >= EXAMPLES[kind]
    if (full and draw <= kept[0][0]) or _is_grave(record):
        return
    entry = (draw, record.id, _example(record, kind, source))
    if full:
        heapq.heapreplace(kept, entry)
    else:
        heapq.heappush(kept, entry)


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


def _is_grave(record: CerRecord) -> bool:
    """Whether a text holds signs of danger: such rows are data, and no illustration."""
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
            verdicts.append(f"{place}, found: {candidate.reason}")
    if record.preference is not None and record.preference_by is not None:
        verdicts.append(f"Preference: {record.preference} ({_by(record.preference_by)})")
    return Example(
        kind=kind,
        id=record.id,
        source=source,
        history=tuple(
            f"{speakers[said.speaker]}: {_short(said.text)}"
            for said in record.case.history[-_LAST_TURNS:]
        ),
        candidates=tuple(_shown(candidate) for candidate in record.candidates),
        verdicts=tuple(verdicts),
    )


_VERDICTS = {True: "right", False: "wrong", None: "not judged"}


def _shown(candidate: Candidate) -> str:
    return f"({candidate.author}) {candidate.turn or _short(candidate.reply)}"


def _short(text: str) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) <= _LONGEST_TEXT else f"{joined[:_LONGEST_TEXT].rstrip()} ..."


# --- the page ---------------------------------------------------------------------------------


def render(card: Card) -> str:
    """Return the card in Markdown."""
    rows = sum(card.files.values())
    strictest = next(iter(card.licences), "none stated")
    parts = [
        _front_matter(card, strictest),
        f"# {card.title}",
        card.about,
        f"{rows:,} rows of CER: a dialogue, one or two answers to it, whether each step of an answer's "
        "reasoning is right, and which answer is better. Each verdict names who or what decided it.",
        _counts(card),
        _balance(card),
        _made(card.reports),
        _chosen(card.reports),
        _figures(card.reports, "settle", "Agreement of the annotators"),
        _figures(card.reports, "leaks", "What a test set holds leaves training"),
        _licences(card, strictest),
        _examples(card.examples),
        "## Limits\n\n" + "\n".join(f"- {limit}" for limit in card.limits),
    ]
    if card.command:
        parts.append(f"## Building it again\n\n```sh\n{card.command}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(card: Card, strictest: str) -> str:
    slug = strictest.casefold().replace(" ", "-")
    known = slug.startswith("cc") or slug == "mit"
    languages = sorted(card.counts.get("language", {}))
    lines = ["---", f"license: {slug if known else 'other'}"]
    if languages:
        lines.append(f"language: [{', '.join(languages)}]")
    return "\n".join([*lines, "---"])


Align = Literal["left", "right"]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table whose first `left` columns hold words and the others numbers."""
    dashes = ["---" if column < left else "---:" for column in range(len(head))]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        for cells in (head, dashes, *rows)
    )


def _counts(card: Card) -> str:
    rows = [("file", name, count) for name, count in card.files.items()]
    rows += [
        (facet, value, count)
        for facet, values in card.counts.items()
        for value, count in values.items()
    ]
    cells = ([facet, value, f"{count:,}"] for facet, value, count in rows)
    return "## What it holds\n\n" + _table(["By", "", "Rows"], cells, left=2)


def _balance(card: Card) -> str:
    parts = ["## How the labels are spread"]
    if card.wrong:
        steps = [part.value for part in STEPS]
        parts.append("Steps that are wrong, with Wilson's 95 % interval and the number judged:")
        parts.append(
            _table(
                ["Rows", *steps],
                (
                    [group, *(_share_cell(shares.get(step)) for step in steps)]
                    for group, shares in card.wrong.items()
                ),
            )
        )
    if card.preferences:
        answers = [answer.value for answer in Preference]
        parts.append("Which answer is better, in the order in which they are shown:")
        parts.append(
            _table(
                ["Rows", *answers],
                (
                    [group, *(_share_cell(shares.get(answer)) for answer in answers)]
                    for group, shares in card.preferences.items()
                ),
            )
        )
    return "\n\n".join(parts) if len(parts) > 1 else ""


def _share_cell(found: Share | None) -> str:
    if found is None:
        return "–"
    return (
        f"{100 * found.value:.1f} % ({100 * found.low:.1f} to {100 * found.high:.1f}; "
        f"n = {found.of:,})"
    )


def _made(reports: Sequence[StepReport]) -> str:
    if not reports:
        return ""
    steps = _table(
        ["Step", "read", "written", "left out"],
        (
            [report.step, f"{report.read:,}", f"{report.written:,}", f"{report.dropped_count:,}"]
            for report in reports
        ),
    )
    dropped = [
        [report.step, corpus, reason, f"{count:,}"]
        for report in reports
        for corpus, reasons in report.dropped.items()
        for reason, count in reasons.items()
        if count
    ]
    parts = ["## How it was made", steps]
    if dropped:
        parts += [
            "What was left out, and why:",
            _table(["Step", "Corpus", "Reason", "Rows"], dropped, left=3),
        ]
    return "\n\n".join(parts)


def _chosen(reports: Sequence[StepReport]) -> str:
    """Render what the silver rule found, and what was taken of it."""
    report = next((each for each in reports if each.step == "silver"), None)
    if report is None:
        return ""
    figures = report.figures
    rates, links = [], []
    for split in ("train", "valid", "test"):
        for which, words in (("raw", "all judged"), ("selected", "taken")):
            prefix = f"{split}.{which}"
            if not figures.get(f"{prefix}.rows"):
                continue
            wrong = [_number(figures.get(f"{prefix}.wrong.{part}"), percent=True) for part in STEPS]
            rates.append([split, words, _number(figures.get(f"{prefix}.rows")), *wrong])
            for part in STEPS[1:]:
                about = f"{prefix}.{part}"
                shares = [
                    _number(figures.get(f"{about}.wrong_after_{earlier}"), percent=True)
                    for earlier in ("wrong", "right")
                ]
                measures = [_number(figures.get(f"{about}.{name}")) for name in ("phi", "bits")]
                links.append([split, words, part.value, *shares, *measures])
    notes = [
        f"In {name.split('.')[0]}, {value}."
        for name, value in figures.items()
        if name.endswith(".note")
    ]
    parts = [
        "## Judged and taken",
        "A small model's steps are wrong more often than a data set should hold. Rows were drawn by "
        "the pattern of their labels (raking), which changes how often a step is wrong and keeps "
        "the odds ratios of the rows that are drawn from: all but some answers to a mere greeting.",
        _table(["Split", "Rows", "n", *(f"{part} wrong" for part in STEPS)], rates, left=2),
        "How a step's label goes with the earlier ones: how often it is wrong where an earlier step "
        "is wrong, and where all of them are right; the correlation (phi) and the mutual information.",
        _table(
            ["Split", "Rows", "Step", "wrong after wrong", "wrong after right", "phi", "bits"],
            links,
            left=3,
        ),
        *notes,
    ]
    return "\n\n".join(parts)


def _figures(reports: Sequence[StepReport], step: str, title: str) -> str:
    report = next((each for each in reports if each.step == step), None)
    if report is None or not report.figures:
        return ""
    rows = ([name, _number(value)] for name, value in report.figures.items())
    return f"## {title}\n\n" + _table(["Figure", "Value"], rows)


def _number(value: float | int | str | None, *, percent: bool = False) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if percent:
        return f"{100 * value:.1f} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def _licences(card: Card, strictest: str) -> str:
    if not card.licences:
        return ""
    rows = ([licence, f"{count:,}"] for licence, count in card.licences.items())
    return "\n\n".join(
        [
            "## Licences",
            f"The strictest is **{strictest}**: use of the whole is bound by it. Rows carry the "
            "licence of their corpus, so a part can be used by its own terms.",
            _table(["Licence of the corpus", "Rows"], rows),
        ]
    )


def _examples(examples: Sequence[Example]) -> str:
    """Render the examples, and say which kinds there are none of."""
    parts = ["## Examples"]
    for kind in Kind:
        shown = [example for example in examples if example.kind is kind]
        parts.append(f"### {kind}")
        if not shown:
            parts.append("There is no such row that may be quoted.")
        for example in shown:
            candidates = [
                f"{place} {candidate}"
                for place, candidate in zip(("First", "Second"), example.candidates, strict=False)
            ]
            body = "\n".join([*example.history, "", *candidates])
            parts.append(f"From {example.source}; row `{example.id}`.")
            parts.append(f"{_fence(body)}text\n{body}\n{_fence(body)}")
            parts.append("\n".join(f"- {verdict}" for verdict in example.verdicts))
    return "\n\n".join(part for part in parts if part)


def _fence(body: str) -> str:
    """Return a fence that the text does not hold."""
    fence = "```"
    while fence in body:
        fence += "`"
    return fence
