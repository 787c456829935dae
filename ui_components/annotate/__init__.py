"""The annotation desk in the browser."""
