"""What leaves this machine: archives for a colleague, uploads to the hub."""
