"""The default folder for uploads and votes.

Two environment variables override it for all commands: ``COMPEER_DATA_DIR`` (a folder) and
``COMPEER_DATABASE_URL`` (a database for the votes).
"""

import os
from pathlib import Path

import platformdirs

DATA_DIR = "COMPEER_DATA_DIR"
DATABASE_URL = "COMPEER_DATABASE_URL"


def default_data_folder() -> Path:
    """Return the user's data folder; it may not exist yet."""
    folder = os.environ.get(DATA_DIR)
    return Path(folder) if folder else platformdirs.user_data_path("compeer", appauthor=False)
