"""Building blocks shared by all recipes: plain torch modules, independent of training."""
