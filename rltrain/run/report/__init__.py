"""What a run shows of itself: on the screen, in its folder and to trackers."""
