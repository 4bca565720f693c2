"""From a model to a bundle of ONNX graphs: the only package with torch."""
