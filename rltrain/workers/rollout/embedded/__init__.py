"""The engine that computes with the trained model itself."""
