"""Where models run: in this process, behind an endpoint, or recorded. See `protocol`."""
