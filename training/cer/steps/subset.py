"""Draw a subset of the corpora, to try a route before paying for all of it.

Sources are drawn for each split, so that all layouts of a dialogue stay together.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from compeer_core.row_files import write_rows
from training.cer.records import SourceDialogue, StepReport
from training.cer.requests.seeding import stable_hash
from training.data.records import read_records

NOT_DRAWN = "not in the subset"


def draw_sources(
    source: Path, output: Path, per_split: int | Mapping[str, int], seed: int
) -> StepReport:
    """Copy the dialogues of `per_split` sources of each split.

    Args:
        source: `SourceDialogue` rows with splits.
        output: Receives the rows of the drawn sources, in order.
        per_split: The number of sources, of each split or by split; all if there are fewer, none of a
            split that is not named.
        seed: The seed of the draw.
    """

    def limit(split: str | None) -> int:
        if isinstance(per_split, int):
            return per_split
        return per_split.get(split or "", 0)

    smallest: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    seen: set[int] = set()
    for row in read_records(source, SourceDialogue):
        draw = stable_hash(str(seed), "trial", row.corpus, row.source_id)
        if draw in seen:
            continue
        seen.add(draw)
        heap = smallest[row.split or ""]
        heapq.heappush(heap, (-draw, row.source_id))
        if len(heap) > limit(row.split):
            heapq.heappop(heap)
    drawn = {source_id for heap in smallest.values() for _, source_id in heap}
    dropped: Counter[str] = Counter()

    def subset() -> Iterator[SourceDialogue]:
        for row in read_records(source, SourceDialogue):
            if row.source_id in drawn:
                yield row
            else:
                dropped[row.corpus] += 1

    written = write_rows(output, subset())
    return StepReport(
        step="trial",
        read=written + dropped.total(),
        written=written,
        dropped={corpus: {NOT_DRAWN: count} for corpus, count in sorted(dropped.items())},
    )
