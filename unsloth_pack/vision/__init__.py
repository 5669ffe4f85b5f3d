"""`FastVisionModel` and `VisionDataCollator`: models of vision and language for notebooks."""
