"""Annotations of supporter turns: records, agreement, and the annotation desk."""
