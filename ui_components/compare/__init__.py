"""The screen that compares models blind and takes votes."""
