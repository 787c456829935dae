"""Silver CER: labels by a published rule, a documented baseline for trained judges."""
