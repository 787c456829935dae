"""The leaderboard screen and its files."""
