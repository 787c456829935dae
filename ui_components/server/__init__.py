"""The web server around the page: middleware, limits, uploads, API."""
