"""Where base weights come from, and how a model directory is made of them."""
