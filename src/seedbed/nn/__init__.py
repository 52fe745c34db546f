"""Building blocks shared by all recipes: plain torch modules that know nothing of training."""
