"""Workers that are slow, not dead: found, shown with their figures, replaced or given fewer layers."""
