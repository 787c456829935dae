"""The server's own counters for Prometheus. Numbers only, no visitor's words."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from compeer_core.turn import TurnRecord

SECONDS = (0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120)


class Metrics:
    """Counters of one server, with a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._turns = Counter(
            "compeer_turns",
            "Turns that ended, by model and by how they ended.",
            ["model", "status"],
            registry=self._registry,
        )
        self._incomplete = Counter(
            "compeer_incomplete_turns",
            "Finished turns that lack a part.",
            ["model"],
            registry=self._registry,
        )
        self._tokens = Counter(
            "compeer_tokens", "Tokens that were generated.", ["model"], registry=self._registry
        )
        self._first_token = Histogram(
            "compeer_first_token_seconds",
            "From the start of a turn to its first token.",
            ["model"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._scoring = Histogram(
            "compeer_scoring_seconds",
            "From the last token of a turn to its last score.",
            ["model"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self.waiting = Gauge(
            "compeer_waiting", "Visitors who wait in line.", registry=self._registry
        )
        self.conversations = Gauge(
            "compeer_conversations", "Conversations held in memory.", registry=self._registry
        )

    def count(self, record: TurnRecord) -> None:
        """Count a turn that ended."""
        self._turns.labels(record.model, record.status).inc()
        self._tokens.labels(record.model).inc(record.tokens)
        if record.status == "finished" and not record.reading.is_complete:
            self._incomplete.labels(record.model).inc()
        if record.first_token_seconds is not None:
            self._first_token.labels(record.model).observe(record.first_token_seconds)
        if record.judgement is not None:
            self._scoring.labels(record.model).observe(record.scoring_seconds)

    def text(self) -> bytes:
        """Return all counters in Prometheus' text format."""
        return generate_latest(self._registry)
