"""How the tables of the votes store came to be, step by step; see `compeer_core.votes.database`."""
