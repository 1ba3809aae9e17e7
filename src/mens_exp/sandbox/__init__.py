"""The only way generated code is executed."""
