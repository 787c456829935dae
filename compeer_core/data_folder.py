"""Where what a person has made is kept when nobody says where.

The page's uploads and the votes lie beside each other, whoever asks first. Two environment variables
name other places for all commands at once: ``COMPEER_DATA_DIR`` a folder, ``COMPEER_DATABASE_URL`` a
database for the votes.
"""

import os
from pathlib import Path

import platformdirs

DATA_DIR = "COMPEER_DATA_DIR"
DATABASE_URL = "COMPEER_DATABASE_URL"


def default_data_folder() -> Path:
    """Return where programs of this user keep their data; it need not be there yet."""
    named = os.environ.get(DATA_DIR)
    return Path(named) if named else platformdirs.user_data_path("compeer", appauthor=False)
