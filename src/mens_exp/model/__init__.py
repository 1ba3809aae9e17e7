"""Sources of base weights, and the creation of a model directory from them."""
