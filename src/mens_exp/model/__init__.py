"""Sources of base weights, and the making of a model directory from them."""
