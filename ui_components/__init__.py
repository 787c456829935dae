"""The page and its API: one file per part. Gradio lives here and in ``app.py`` only.

``services`` holds what all visitors share, ``session`` what one visitor has said, ``writing`` a
reply on its way. ``chat`` and ``inspector`` are the two halves of the page, ``page`` puts them
together, ``api`` is the same for programs, and ``server`` carries both.
"""
