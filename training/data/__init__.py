"""Rows, histories and pictures as training stages read them."""
