"""The image tower of the small models learns facial expressions."""
