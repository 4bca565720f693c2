"""What runs on a device: numpy and onnxruntime, nothing heavier."""
