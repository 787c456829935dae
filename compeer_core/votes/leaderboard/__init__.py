"""The leaderboard: ratings of models from votes, as a board, text, tables and a picture."""
