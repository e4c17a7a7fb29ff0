"""Engine that generates with the trained model itself."""
