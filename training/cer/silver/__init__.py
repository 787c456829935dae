"""Silver CER: verdicts by a published rule, a documented baseline for learnt judges."""
