"""The tour for stakeholders."""
