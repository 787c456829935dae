"""Where what a person has made is kept when nobody says where.

The page's uploads and the votes lie beside each other, whoever asks first.
"""

from pathlib import Path

import platformdirs


def default_data_folder() -> Path:
    """Return where programs of this user keep their data; it need not be there yet."""
    return platformdirs.user_data_path("compeer", appauthor=False)
