"""Training of the small models' image tower on facial expressions."""
