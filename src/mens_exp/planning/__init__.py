"""Actions, costs and problems of a run before it starts; torch-free."""
