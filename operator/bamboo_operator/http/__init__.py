"""The operator's web port: health, metrics and job pages."""
