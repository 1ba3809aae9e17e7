"""What a run would do and cost, and what is wrong with it; torch-free."""
