"""Preview a run before it starts: its actions, costs and problems; does not import torch."""
