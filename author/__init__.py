"""A model, in English: its description becomes programs and a manifest of slices and folds."""
