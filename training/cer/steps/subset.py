"""A small part of the corpora, to try a route before it is paid for.

Sources are drawn, so that all layouts of a dialogue stay together, and each split has its own.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from training.cer.records import SourceDialogue, StepReport
from training.cer.requests.seeding import stable_hash
from training.data.samples import read_records, write_records

NOT_DRAWN = "not drawn for the trial"


def draw_sources(source: Path, output: Path, per_split: int, seed: int) -> StepReport:
    """Copy the dialogues of so many sources of each split.

    Args:
        source: `SourceDialogue` rows with splits.
        output: Receives the rows of the sources that were drawn, in their order.
        per_split: How many sources; all where there are fewer.
        seed: Of the draw.
    """
    smallest: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    seen: set[int] = set()
    for row in read_records(source, SourceDialogue):
        draw = stable_hash(str(seed), "trial", row.corpus, row.source_id)
        if draw in seen:
            continue
        seen.add(draw)
        heap = smallest[row.split or ""]
        heapq.heappush(heap, (-draw, row.source_id))
        if len(heap) > per_split:
            heapq.heappop(heap)
    drawn = {source_id for heap in smallest.values() for _, source_id in heap}
    dropped: Counter[str] = Counter()

    def kept() -> Iterator[SourceDialogue]:
        for row in read_records(source, SourceDialogue):
            if row.source_id in drawn:
                yield row
            else:
                dropped[row.corpus] += 1

    written = write_records(output, kept())
    return StepReport(
        step="trial",
        read=written + dropped.total(),
        written=written,
        dropped={corpus: {NOT_DRAWN: count} for corpus, count in sorted(dropped.items())},
    )
