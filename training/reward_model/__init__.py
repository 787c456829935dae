"""Training UnifiReward: one model that judges every step of a turn and its reply."""
