"""Four-bit base weights through bitsandbytes."""
