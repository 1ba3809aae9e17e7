"""What listens to training: one callback a file, none importing another."""
