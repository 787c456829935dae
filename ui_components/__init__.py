"""The page and its API. Only this package and ``app.py`` use gradio.

One package per screen (`chat`, `compare`, `results`, `annotate`, `tour`); `shared` holds what
several screens use (sessions, jobs, texts), `server` the web server around them, and `page` puts
the screens together.
"""
