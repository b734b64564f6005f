"""Decisions and contracts of Bamboo. No torch, no kopf: everything here runs anywhere."""
