"""Rows of two candidates: the order is drawn, so that a judge does not learn to prefer a side."""

from compeer_core.cer import Candidate, Case, CerRecord, DecidedBy
from compeer_core.taxonomy import Preference


def pair_of(
    name: str,
    case: Case,
    left: Candidate,
    right: Candidate,
    *,
    preference: Preference | None,
    by: DecidedBy,
    swapped: bool,
) -> CerRecord:
    """Return the row of two candidates; if `swapped`, `right` comes first and the preference is turned round.

    `by` decided the preference; without a preference it is left out.
    """
    if swapped:
        left, right = right, left
        preference = preference and preference.swapped()
    return CerRecord(
        id=name,
        case=case,
        first=left,
        second=right,
        preference=preference,
        preference_by=by if preference else None,
    )
