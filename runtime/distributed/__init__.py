"""Exchange chunks between ranks."""
