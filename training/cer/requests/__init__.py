"""Requests to generators: many at a time, each answered once, all responses stored."""
