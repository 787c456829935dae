"""Shared by all stages: run directories, JSON lines, progress, multiple processes, results."""
