"""Pictures of a study, one file a figure: compute what is shown, then draw it."""
