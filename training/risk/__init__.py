"""Trains the learned check for signs of danger."""
