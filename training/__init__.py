"""Everything that makes the checkpoints: `python -m training <stage> <config.toml>`."""
