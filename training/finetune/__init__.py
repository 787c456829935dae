"""Shared by the fine-tuning stages: base models, adapters, trl trainers, shared-prefix rows."""
