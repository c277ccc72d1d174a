"""The model card, and uploads to the Hub."""
