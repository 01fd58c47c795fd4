"""Products of a step's rows with one layer of stacked weights, read where the weights lie."""
