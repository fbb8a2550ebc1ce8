"""Eight image tasks on the whole of DINOv2-small."""
