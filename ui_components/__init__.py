"""The page and its API: one file per part. Gradio lives here and in ``app.py`` only.

``services`` holds what all visitors share, ``session`` what one visitor has said, ``writing`` a
reply on its way, ``progress`` how far it has come. ``conversation`` and ``inspector`` draw the two
halves of the page, ``chat`` answers its buttons, ``page`` puts it together. ``api`` is the same for
programs, and ``server`` carries both.
"""
