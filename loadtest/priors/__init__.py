"""Cost priors of models, from their architecture."""
